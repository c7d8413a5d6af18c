#include "barriers.cuh"

extern "C" __global__ void __launch_bounds__(160) kernel(const u32* A, u32* D, u32* E) {
  extern __shared__ __align__(128) u32 ring[];  // 2 stages of 2048 words, 2 of 1024 on the way out
  __shared__ __align__(8) u64 b[4];
  int i = threadIdx.x;
  u32 at = shared_address(ring), full = shared_address(b), empty = full + 16, out = at + 16384;
  const u32* mine = A + blockIdx.x * 12288;
  if (i == 0) {
    for (int k = 0; k < 2; ++k) {
      init(full + 8 * k, 1);
      init(empty + 8 * k, 128);
    }
    inits_visible();
  }
  __syncthreads();
  if (i >= 128) {
    if (i == 128) {
      for (int k = 0; k < 6; ++k) {
        int s = k & 1;
        u32 phase = k >> 1 & 1;
        wait(empty + 8 * s, phase ^ 1);
        arrive_expect(full + 8 * s, 8192);
        load(at + 8192 * s, mine + 2048 * k, 4096, full + 8 * s);
        load(at + 8192 * s + 4096, mine + 2048 * k + 1024, 16, full + 8 * s);
        load(at + 8192 * s + 4112, mine + 2048 * k + 1028, 4080, full + 8 * s);
      }
    }
  } else {
    for (int k = 0; k < 6; ++k) {
      int s = k & 1;
      u32 phase = k >> 1 & 1;
      if (i == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      asm volatile("bar.sync 1, 128;" ::: "memory");
      wait(full + 8 * s, phase);
      for (int j = i; j < 1024; j += 128)
        ring[4096 + 1024 * s + j] = ring[2048 * s + j] + 3 * ring[2048 * s + 2047 - j];
      arrive(empty + 8 * s);
      to_async_proxy();
      asm volatile("bar.sync 1, 128;" ::: "memory");
      if (i == 0) {
        store(D + blockIdx.x * 6144 + 1024 * k, out + 4096 * s, 4096);
        commit();
      }
    }
    if (i == 0) {
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
      E[blockIdx.x] = D[blockIdx.x * 6144 + 6143] ^ D[blockIdx.x * 6144];
    }
  }
}
