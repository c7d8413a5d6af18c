#include "barriers.cuh"

extern "C" __global__ void __launch_bounds__(64) kernel(const u32* A, u32* D) {
  __shared__ __align__(8) u64 b[4];
  int i = threadIdx.x;
  u32 b0 = shared_address(&b[0]), b1 = b0 + 8, b2 = b0 + 16, b3 = b0 + 24, n = 0, left, done;
  u64 state;
  if (i == 0) {
    init(b0, 3);
    init(b1, 63);
    init(b2, 1);
    init(b3, 5);
  }
  __syncthreads();
  if (i == 0) {
    for (int phase = 0; phase < 3; ++phase) {
      for (int k = 0; k < 3; ++k) {
        asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(b0) : "memory");
        asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(left) : "l"(state));
        asm volatile("{.reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(b0), "l"(state)
                     : "memory");
        D[n++] = left * 2 + done;
      }
      for (u32 parity = 0; parity < 2; ++parity) {
        asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(b0), "r"(parity)
                     : "memory");
        D[n++] = done;
      }
    }
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], 2;" : "=l"(state) : "r"(b0) : "memory");
    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(left) : "l"(state));
    D[n++] = left;
    asm volatile("mbarrier.arrive.noComplete.shared::cta.b64 %0, [%1], 3;" : "=l"(state) : "r"(b3) : "memory");
    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(left) : "l"(state));
    D[n++] = left;
    // bytes that are expected and completed by hand
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 48;" ::"r"(b2) : "memory");
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(b2) : "memory");
    for (int k = 0; k < 3; ++k) {
      asm volatile("{.reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                   : "=r"(done)
                   : "r"(b2), "l"(state)
                   : "memory");
      D[n++] = done;
      asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" ::"r"(b2) : "memory");
    }
    asm volatile("{.reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(b2), "l"(state)
                 : "memory");
    D[n++] = done;
  } else {
    arrive(b1);
  }
  wait(b1, 0);
  D[24 + i] = A[i] + 1;
  __syncthreads();
  if (i == 0) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(b1) : "memory");
    init(b1, 2);
  }
  __syncthreads();
  if (i < 2) arrive(b1);
  wait(b1, 0);
  D[88 + i] = A[63 - i];
}
