#include "barriers.cuh"

extern "C" __global__ void __launch_bounds__(256) kernel(const u32* A, u32* D) {
  __shared__ u32 ring[3][128];
  __shared__ __align__(8) u64 b[6];
  int i = threadIdx.x, j = i & 127;
  u32 full = shared_address(b), empty = full + 24;
  if (i == 0) {
    for (int k = 0; k < 3; ++k) {
      init(full + 8 * k, 128);
      init(empty + 8 * k, 4);
    }
    inits_visible();
  }
  __syncthreads();
  if (i < 128) {
    for (int k = 0; k < 10; ++k) {
      int s = k % 3;
      u32 phase = k / 3 & 1;
      wait(empty + 8 * s, phase ^ 1);
      ring[s][j] = A[128 * k + j] ^ (k << 24);
      arrive(full + 8 * s);
    }
  } else {
    u32 sum = 0;
    for (int k = 0; k < 10; ++k) {
      int s = k % 3;
      u32 phase = k / 3 & 1;
      wait(full + 8 * s, phase);
      sum = sum * 31 + ring[s][(j * 45 + k) & 127];
      __syncwarp();
      if ((i & 31) == 0) arrive(empty + 8 * s);
      D[128 * k + j] = sum;
    }
  }
}
