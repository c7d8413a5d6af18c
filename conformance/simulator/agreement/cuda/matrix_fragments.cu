#include "common.cuh"

extern "C" __global__ void __launch_bounds__(32) kernel(const u32* A, u32* D) {
  __shared__ __align__(128) u32 s[1024];
  int i = threadIdx.x;
  for (int k = 0; k < 32; ++k) s[32 * k + i] = A[32 * k + i];
  __syncwarp();
  u32 at = shared_address(s) + 16 * ((i * 5 + 3) & 31) + 512 * (i >> 4), x, y, z, w;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
               : "r"(at));
  D[i] = x;
  D[32 + i] = y;
  D[64 + i] = z;
  D[96 + i] = w;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
               : "r"(at));
  D[128 + i] = x;
  D[160 + i] = y;
  D[192 + i] = z;
  D[224 + i] = w;
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "r"(at));
  D[256 + i] = x;
  D[288 + i] = y;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(x) : "r"(at));
  D[320 + i] = x;
  __syncwarp();
  u32 out = shared_address(s) + 2048 + 16 * (31 - i);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(out), "r"(x), "r"(y), "r"(z),
               "r"(w)
               : "memory");
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0+512], {%1,%2};" ::"r"(out), "r"(z), "r"(w)
               : "memory");
  __syncwarp();
  for (int k = 0; k < 8; ++k) D[352 + 32 * k + i] = s[512 + 32 * k + i];
}
