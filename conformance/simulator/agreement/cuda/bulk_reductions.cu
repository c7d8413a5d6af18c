#include "barriers.cuh"

#define REDUCE(operation, to, from, n)                                                                       \
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." operation " [%0], [%1], %2;" ::"l"(to), \
               "r"(from), "r"(n)                                                                             \
               : "memory")
extern "C" __global__ void __launch_bounds__(128) kernel(const u32* A, u32* D) {
  __shared__ __align__(128) u32 s[1024];
  int i = threadIdx.x;
  u32 at = shared_address(s);
  for (int k = i; k < 1024; k += 128) s[k] = A[k];
  for (int k = i; k < 14 * 256; k += 128) D[k] = A[1024 + k];
  __syncthreads();
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (i == 0) {
    REDUCE("add.u32", D, at, 1024);
    REDUCE("add.s32", D + 256, at + 512, 1024);
    REDUCE("min.u32", D + 512, at, 1024);
    REDUCE("min.s32", D + 768, at, 1024);
    REDUCE("max.u32", D + 1024, at, 1024);
    REDUCE("max.s32", D + 1280, at + 16, 1008);
    REDUCE("and.b32", D + 1536, at, 1024);
    REDUCE("or.b32", D + 1792, at, 1024);
    REDUCE("xor.b32", D + 2048, at, 16);
    REDUCE("add.u64", D + 2304, at, 1024);
    REDUCE("inc.u32", D + 2560, at, 1024);
    REDUCE("dec.u32", D + 2816, at, 1024);
    REDUCE("add.noftz.bf16", D + 3072, at, 1024);
    REDUCE("add.noftz.f16", D + 3328, at, 1024);
    commit();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
