// Attention backward on Blackwell: Note [Backward] of flamia.reference.backward under the profile "blackwell", bit for bit.
//
// Note [Backward barriers]
// ~~~~~~~~~~~~~~~~~~~~~~~~
//   barrier         arrives                                  waits                what it hands over
//   work_full       load                                     all other roles      a work item
//   work_empty      each reader once it has copied it        load                 its place
//   fixed_full      bulk copies                              multiply             the owner's operands
//   fixed_empty     commit behind the item's last product    load                 their place
//   score_full      bulk copies                              multiply             Q of a tile (K for the owner of queries)
//   score_empty     commit behind dK (dQ) of the tile        load                 its place
//   gradient_full   bulk copies                              multiply             dO' of a tile (V, V1)
//   gradient_empty  commit behind dV (dP) of the tile        load                 its place
//   columns_full    both column warps                        compute              what belongs to columns
//   columns_empty   8 compute warps, behind X                column warps         its place
//   s_full          commit behind S                          compute              S; also: dV of the tile before is done
//   s_read          8 compute warps, S in registers          multiply             S's columns 32..63, for scales of dP, dV
//   p_ready         8 compute warps, P and its scales stored multiply             P (owner of keys); dV and dK of the head before
//   g_full          commit behind dP                         compute              dP; also: dK of the tile before is done
//   g_read          8 compute warps, dP and P in registers   multiply             S and P; dP's columns 32..63
//   x_ready         8 compute warps, X and its scales stored multiply             X
//   sums_full       commit behind a sum's last product       compute              dV and dK, or dQ
//   settled         commit (STRICT)                          multiply             nothing is under way
#include "blackwell/backward_compute.cuh"
#include "blackwell/backward_load.cuh"
#include "blackwell/backward_multiply.cuh"

using namespace blackwell;
namespace b = blackwell::backward;

extern "C" __constant__ const int attention_backward_shared_bytes = sizeof(b::Shared);

__device__ __forceinline__ void init(uint64_t& barrier, uint32_t arrivals) { ptx::mbarrier_init(at(&barrier), arrivals); }

__device__ __forceinline__ void init_barriers(b::Shared& shared) {
  for (int i = 0; i < b::WORK_STAGES; ++i) {
    init(shared.work_full[i], 1);
    init(shared.work_empty[i], 1 + b::COLUMN_WARPS + b::COMPUTE_WARPS);
  }
  for (int i = 0; i < b::FIXED_STAGES; ++i) {
    init(shared.fixed_full[i], 1);
    init(shared.fixed_empty[i], 1);
  }
  for (int i = 0; i < b::STREAM_STAGES; ++i) {
    init(shared.score_full[i], 1);
    init(shared.score_empty[i], 1);
    init(shared.gradient_full[i], 1);
    init(shared.gradient_empty[i], 1);
  }
  for (int i = 0; i < b::COLUMN_STAGES; ++i) {
    init(shared.columns_full[i], b::COLUMN_WARPS);
    init(shared.columns_empty[i], b::COMPUTE_WARPS);
  }
  init(shared.s_full, 1);
  init(shared.g_full, 1);
  init(shared.sums_full, 1);
  init(shared.settled, 1);
  init(shared.s_read, b::COMPUTE_WARPS);
  init(shared.g_read, b::COMPUTE_WARPS);
  init(shared.p_ready, b::COMPUTE_WARPS);
  init(shared.x_ready, b::COMPUTE_WARPS);
  ptx::fence_mbarrier_init();
}

extern "C" __global__ void __launch_bounds__(b::THREADS, 1)
    attention_backward(const __grid_constant__ b::BackwardParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  b::Shared& shared = *reinterpret_cast<b::Shared*>(memory);
  const int warp = ptx::shfl_idx(threadIdx.x / 32, 0);
  if (warp == b::LOAD_WARP && ptx::elect_sync()) init_barriers(shared);
  if (warp == b::MULTIPLY_WARP) {
    ptx::tcgen05_alloc(at(&shared.tensor_memory), b::COLUMNS);
    ptx::tcgen05_relinquish_alloc_permit();
  }
  if (threadIdx.x < 128) reinterpret_cast<uint32_t*>(shared.one_scales)[threadIdx.x] = 0x7F7F7F7Fu;  // E8M0 1.0
  ptx::fence_proxy_async();
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  const uint32_t tensor = shared.tensor_memory;

  if (warp < b::COMPUTE_WARPS) {
    ptx::setmaxnreg_inc<b::COMPUTE_REGISTERS>();
    b::Computer{p, shared, tensor + lanes_of_warp(warp % 4)}.run();
  } else {
    ptx::setmaxnreg_dec<b::OTHER_REGISTERS>();
    if (warp == b::LOAD_WARP) {
      if (ptx::elect_sync()) b::load(p, shared);
      ptx::bar_warp_sync();
    } else if (warp == b::MULTIPLY_WARP) {
      if (ptx::elect_sync()) b::Multiplier{shared, tensor, p.group}.run();
      ptx::bar_warp_sync();
    } else {
      b::prepare_columns(p, shared);
    }
  }
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  if (warp == b::MULTIPLY_WARP) {
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_dealloc(tensor, b::COLUMNS);
  }
}
