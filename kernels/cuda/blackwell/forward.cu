// Attention forward on Blackwell: Note [Forward] of flamia.reference.forward under the profile "blackwell", bit for bit.
#include "blackwell/epilogue.cuh"
#include "blackwell/load.cuh"
#include "blackwell/multiply.cuh"
#include "blackwell/softmax.cuh"

using namespace blackwell;

extern "C" __constant__ const int attention_forward_shared_bytes = sizeof(Shared);

__device__ __forceinline__ void init(uint64_t& barrier, uint32_t arrivals) { ptx::mbarrier_init(at(&barrier), arrivals); }

__device__ __forceinline__ void init_barriers(Shared& shared) {
  for (int i = 0; i < WORK_STAGES; ++i) {
    init(shared.work_full[i], 1);
    init(shared.work_empty[i], 1 + 4 * QUERY_TILES + 4);
  }
  for (int i = 0; i < K_STAGES; ++i) {
    init(shared.k_full[i], 1);
    init(shared.k_empty[i], 1);
  }
  for (int i = 0; i < V_STAGES; ++i) {
    init(shared.v_full[i], 1);
    init(shared.v_empty[i], 1);
  }
  for (int i = 0; i < QUERY_TILES; ++i) {
    init(shared.q_full[i], 1);
    init(shared.q_empty[i], 1 + 4);
    init(shared.s_full[i], 1);
    init(shared.s_read[i], 4);
    init(shared.p_ready[i], 4);
    init(shared.pv_done[i], 1);
    init(shared.l_read[i], 4);
    init(shared.rows_final[i], 4);
    init(shared.o_free[i], 4);
  }
  ptx::fence_mbarrier_init();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = ptx::shfl_idx(threadIdx.x / 32, 0);
  if (warp == LOAD_WARP && ptx::elect_sync()) init_barriers(shared);
  if (warp == MULTIPLY_WARP) {
    ptx::tcgen05_alloc(at(&shared.tensor_memory), COLUMNS);
    ptx::tcgen05_relinquish_alloc_permit();
  }
  if (threadIdx.x < 256) reinterpret_cast<uint32_t*>(shared.ones)[threadIdx.x] = 0x38383838u;  // E4M3 1.0
  ptx::fence_proxy_async();
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  const uint32_t tensor = shared.tensor_memory;

  if (warp < EPILOGUE_WARP) {
    ptx::setmaxnreg_inc<SOFTMAX_REGISTERS>();
    softmax(p, shared, tensor);
  } else if (warp < LOAD_WARP) {
    ptx::setmaxnreg_dec<EPILOGUE_REGISTERS>();
    epilogue(p, shared, tensor);
  } else {
    ptx::setmaxnreg_dec<OTHER_REGISTERS>();
    if (warp == LOAD_WARP) {
      if (ptx::elect_sync()) load(p, shared);
      ptx::bar_warp_sync();
    } else if (warp == MULTIPLY_WARP) {
      if (ptx::elect_sync()) Multiplier{shared, tensor, p.causal != 0}.run();
      ptx::bar_warp_sync();
    }
  }
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  if (warp == MULTIPLY_WARP) {
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_dealloc(tensor, COLUMNS);
  }
}
