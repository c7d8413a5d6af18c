// Attention forward on Blackwell: Note [Forward] of flamia.reference.forward, profile "blackwell", bit for bit.
//
// Note [Forward on Blackwell]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A CTA takes work items, of one or two adjacent query tiles of a head, until there are none left. One thread loads
// (load.cuh), one issues every product (multiply.cuh), a warpgroup per query tile turns scores into P (softmax.cuh),
// and one more divides and stores finished rows (epilogue.cuh) while the next item begins. S, P, O and l live in tensor
// memory (layout.cuh).
//
// P needs no running maximum: it is held against its own tile's, and what relates tiles is one scale byte per row,
// which travels with P. So nothing but that byte depends on the tile before, and O is touched only where Note
// [Reference exponent] says so.
//
// Note [Barriers]
// ~~~~~~~~~~~~~~~
// All are mbarriers; phases alternate, and a consumer's first wait for an *empty* barrier passes. i is a query tile.
//
//   barrier         arrives                             waits          says
//   work_full       load                                all            a work item is published
//   work_empty      multiply, softmax, epilogue (13)    load           it has been read by all
//   q_full[i]       load + bytes                        multiply       Q_i, its scales, V1's exponents on the diagonal
//   q_empty[i]      commit, softmax i (4)               load           the item's last scores are done, exponents read
//   k_full, k_empty load + bytes; commit                multiply; load a stage of K
//   v_full, v_empty load + bytes; commit                multiply; load a stage of V
//   s_full[i]       commit                              softmax i      scores are in S_i, P V before is done
//   s_read[i]       softmax i (4)                       multiply       they are in registers: S_i takes scales
//   p_ready[i]      softmax i (4)                       multiply       P, l, their scales are stored, O is rescaled
//   pv_done[i]      commit                              softmax i      O_i and l_i hold this tile
//   l_read[i]       softmax i (4)                       multiply       l is in a register: S_i is free (head_dim 128)
//   rows_final[i]   softmax i (4)                       epilogue       O_i is final; l and m are in shared memory
//   o_free[i]       epilogue (4)                        multiply       O_i and l_i may be overwritten
//
// p_ready carries P's scale byte: 4 bytes per row in a 512-byte block, a proxy fence, one tcgen05.cp. It adds no
// barrier.
#include "blackwell/epilogue.cuh"
#include "blackwell/load.cuh"
#include "blackwell/multiply.cuh"
#include "blackwell/softmax.cuh"

using namespace blackwell;

extern "C" __constant__ const int attention_forward_shared_bytes = sizeof(Shared);

__device__ __forceinline__ void init(uint64_t& barrier, uint32_t arrivals) {
  ptx::mbarrier_init(at(&barrier), arrivals);
}

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
  static_assert(sizeof(shared.ones) == 8 * 256, "256 threads write eight ones each");
  if (threadIdx.x < 256) reinterpret_cast<uint64_t*>(shared.ones)[threadIdx.x] = 0x3838383838383838ull;  // E4M3 1.0
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
