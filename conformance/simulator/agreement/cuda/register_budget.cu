#include "barriers.cuh"

extern "C" __global__ void __launch_bounds__(384, 1) kernel(const u32* A, u32* D) {
  __shared__ __align__(128) u32 s[2][256];
  __shared__ __align__(8) u64 b[4];
  int i = threadIdx.x;
  u32 full = shared_address(b), empty = full + 16;
  if (i == 0) {
    for (int k = 0; k < 2; ++k) {
      init(full + 8 * k, 1);
      init(empty + 8 * k, 256);
    }
    inits_visible();
  }
  __syncthreads();
  if (i < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    u32 leader;
    if (i < 32) {
      asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(leader));
      if (leader)
        for (int k = 0; k < 5; ++k) {
          wait(empty + 8 * (k & 1), (k >> 1 & 1) ^ 1);
          arrive_expect(full + 8 * (k & 1), 1024);
          load(shared_address(s[k & 1]), A + 256 * k, 1024, full + 8 * (k & 1));
        }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    u32 j = i - 128, sum = 1;
    for (int k = 0; k < 5; ++k) {
      wait(full + 8 * (k & 1), k >> 1 & 1);
      sum = sum * 17 + s[k & 1][(j * 3 + k) & 255];
      arrive(empty + 8 * (k & 1));
    }
    D[j] = sum;
  }
}
