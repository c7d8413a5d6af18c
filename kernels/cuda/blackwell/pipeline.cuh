// Waiting for barriers, and positions in rings of buffers.
#pragma once

#include "blackwell/ptx.cuh"

namespace blackwell {

__device__ __forceinline__ uint32_t at(const void* p) { return ptx::shared_address(p); }

// Until the phase of this parity has completed. A fresh barrier counts as having completed a phase of parity 1.
__device__ __forceinline__ void wait(const uint64_t& barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(at(&barrier), parity)) {
  }
}

// One arrival for a warp, behind what all its lanes did.
__device__ __forceinline__ void arrive_warp(const uint64_t& barrier) {
  ptx::bar_warp_sync();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(at(&barrier));
}

// The same behind operations on tensor memory.
__device__ __forceinline__ void arrive_warp_tensor(const uint64_t& barrier) {
  ptx::tcgen05_fence_before_thread_sync();
  arrive_warp(barrier);
}

// Position in a ring of STAGES buffers; `phase` is the parity of the round.
template <int STAGES>
struct Ring {
  uint32_t stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace blackwell
