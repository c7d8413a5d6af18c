#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128) kernel(const u32* A, u32* D) {
  __shared__ __align__(16) u32 s[3072];
  int i = threadIdx.x;
  u32 at = shared_address(s);
  for (int k = i; k < 3072; k += 128) s[k] = 0x11111111u * (k & 7);
  __syncthreads();
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + 16 * i), "l"(A + 4 * i) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at + 2048 + 8 * i), "l"(A + 512 + 2 * i) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at + 4096 + 4 * i), "l"(A + 1024 + i) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at + 8192 + 16 * i), "l"(A + 4 * i), "r"(i % 17)
               : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 2;" ::: "memory");
  D[i] = s[4 * i + 1];
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  D[128 + i] = s[512 + 2 * i] ^ s[1024 + i];
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  for (int k = 0; k < 24; ++k) D[256 + 128 * k + i] = s[128 * k + (i * 11 & 127)];
}
