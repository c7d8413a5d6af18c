// Two groups of products under way at once, into two accumulators; each is taken when it alone must be complete.
#include "barriers.cuh"

#define MULTIPLY(d, a, b)                                                                                \
  asm volatile("{.reg .pred p; setp.ne.u32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16" \
               " {%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0;}"                                                 \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                          \
               : "l"(a), "l"(b)                                                                          \
               : "memory")
#define COMMIT() asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory")
#define WAIT(n, d)                                                       \
  asm volatile("wgmma.wait_group.sync.aligned " #n ";"                   \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory")

extern "C" __global__ void __launch_bounds__(128) kernel(const u32* A, float* D) {
  __shared__ __align__(128) u32 s[8 * 640];  // 8 pairs of operands without swizzle: A 2048 bytes, B 256, spare 256
  int i = threadIdx.x;
  for (int k = i; k < 8 * 640; k += 128) s[k] = A[k] & 0x3fff3fffu;  // no large exponents
  to_async_proxy();
  __syncthreads();
  u64 base = (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
  float even[4] = {0, 0, 0, 0}, odd[4] = {1, 1, 1, 1};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    u32 at = shared_address(s) + 2560 * k;
    u64 a = base | (at & 0x3ffff) >> 4, b = base | ((at + 2048) & 0x3ffff) >> 4;
    if (k & 1) {
      MULTIPLY(odd, a, b);
      COMMIT();
      WAIT(1, even);
      for (int r = 0; r < 4; ++r) D[(4 * k + r) * 128 + i] = even[r];
    } else {
      if (k) {
        WAIT(0, odd);
        for (int r = 0; r < 4; ++r) D[(4 * k + r) * 128 + i] = odd[r];
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      }
      MULTIPLY(even, a, b);
      COMMIT();
    }
  }
  WAIT(0, odd);
  for (int r = 0; r < 4; ++r) D[r * 128 + i] = odd[r];
}
