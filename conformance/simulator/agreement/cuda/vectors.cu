#include "common.cuh"

__constant__ u32 table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
extern "C" __global__ void __launch_bounds__(128) kernel(const u32* A, u32* D) {
  __shared__ __align__(16) u8 s[4096];
  int i = threadIdx.x;
  u32 at = shared_address(s) + 16 * i;
  uint4 v = ((const uint4*)A)[i];
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  asm volatile("st.shared.v2.b16 [%0+2048], {%1,%2};" ::"r"(at), "h"((u16)v.y), "h"((u16)v.z) : "memory");
  asm volatile("st.shared.v4.u8 [%0+2052], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
  asm volatile("st.shared.b64 [%0+2056], %1;" ::"r"(at), "l"((u64)v.w << 32 | v.x) : "memory");
  __syncthreads();
  u32 other = shared_address(s) + 16 * ((i * 37 + 5) & 127);
  u32 x, y, z, w;
  u64 q;
  u16 h, g;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "r"(other));
  asm volatile("ld.shared.s8 %0, [%1+9];" : "=r"(z) : "r"(other));
  asm volatile("ld.shared.u8 %0, [%1+10];" : "=r"(w) : "r"(other));
  asm volatile("ld.shared.b64 %0, [%1+2056];" : "=l"(q) : "r"(other));
  asm volatile("ld.shared.v2.u16 {%0,%1}, [%2+2052];" : "=h"(h), "=h"(g) : "r"(other));
  D[i] = x;
  D[128 + i] = y;
  D[256 + i] = z;
  D[384 + i] = w;
  D[512 + i] = (u32)q;
  D[640 + i] = (u32)(q >> 32);
  D[768 + i] = h | (u32)g << 16;
  asm volatile("ld.shared.s16 %0, [%1+2050];" : "=r"(x) : "r"(other));
  D[896 + i] = x;
  D[1024 + i] = table[v.x & 7] + ((const u8*)A)[i * 3];
  volatile u32 mine[16];  // local memory
  for (int k = 0; k < 16; ++k) mine[k] = v.x + k * i;
  D[1152 + i] = mine[v.y & 15] ^ mine[v.z & 15];
  ((u16*)(D + 1280))[i] = (u16)v.w;
  ((u8*)(D + 1344))[i] = (u8)(v.w >> 9);
}
