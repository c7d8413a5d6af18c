#include "barriers.cuh"

extern "C" __global__ void __launch_bounds__(128) kernel(const u32* A, u32* D) {
  __shared__ __align__(16) u32 s[512];
  __shared__ __align__(8) u64 b[1];
  int i = threadIdx.x;
  u32 at = shared_address(s), bar = shared_address(b);
  if (i == 0) init(bar, 128);
  __syncthreads();
  for (int k = 0; k < 2; ++k) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + 16 * i), "l"(A + 512 * k + 4 * i) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
    wait(bar, k);
    for (int j = 0; j < 4; ++j) D[512 * k + 128 * j + i] = s[511 - 128 * j - i];
    __syncthreads();
  }
}
