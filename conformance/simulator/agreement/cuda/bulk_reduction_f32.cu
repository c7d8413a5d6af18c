#include "barriers.cuh"

extern "C" __global__ void __launch_bounds__(128) kernel(const float* A, float* D) {
  __shared__ __align__(128) float s[1024];
  int i = threadIdx.x;
  u32 at = shared_address(s);
  for (int k = i; k < 1024; k += 128) {
    s[k] = A[k];
    D[k] = A[1024 + k];
  }
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (i == 0)
    for (int k = 0; k < 3; ++k) {  // in order: each waits for the one before
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 4096;" ::"l"(D), "r"(at)
                   : "memory");
      commit();
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
