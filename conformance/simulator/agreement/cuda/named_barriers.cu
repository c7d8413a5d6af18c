#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) kernel(const u32* A, u32* D) {
  __shared__ u32 s[2][64];
  int i = threadIdx.x, role = i >> 6, j = i & 63;
  // role 0 fills two buffers in turn; role 1 drains them; roles 2 and 3 meet on a barrier of their own
  if (role == 0) {
    for (int k = 0; k < 6; ++k) {
      if (k >= 2) asm volatile("bar.sync %0, 128;" ::"r"(3 + (k & 1)) : "memory");  // empty
      s[k & 1][j] = A[j] * (k + 1);
      asm volatile("bar.arrive %0, 128;" ::"r"(1 + (k & 1)) : "memory");  // full
    }
  } else if (role == 1) {
    for (int k = 0; k < 6; ++k) {
      asm volatile("bar.sync %0, 128;" ::"r"(1 + (k & 1)) : "memory");
      D[64 * k + j] = s[k & 1][63 - j];
      if (k < 4) asm volatile("bar.arrive %0, 128;" ::"r"(3 + (k & 1)) : "memory");
    }
  } else {
    u32 a = A[i], count, all, any;
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; barrier.cta.red.popc.aligned.u32 %0, 7, 128, p;}"
                 : "=r"(count)
                 : "r"(a & 1));
    asm volatile(
        "{.reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.and.pred.aligned q, 7, 128, p; selp.b32 %0, 1, 0, q;}"
        : "=r"(all)
        : "r"(a | 1));
    asm volatile(
        "{.reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.pred.aligned q, 7, 128, p; selp.b32 %0, 1, 0, q;}"
        : "=r"(any)
        : "r"(a & 0));
    D[384 + i - 128] = count | all << 16 | any << 17;
  }
  int odd = __syncthreads_count(A[i] & 1), every = __syncthreads_and(i < 255);
  D[512 + i] = odd * 2 + every;
}
