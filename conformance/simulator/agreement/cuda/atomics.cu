#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) kernel(const u32* A, u32* D, u64* W) {
  __shared__ u32 s[16];
  __shared__ u64 t[4];
  __shared__ float f[2];
  int i = threadIdx.x;
  u32 a = A[i], old;
  if (i < 16) s[i] = i == 2 || i == 4 ? 0xffffffffu : 0;
  if (i < 4) t[i] = 0;
  if (i < 2) f[i] = 0;
  if (blockIdx.x == 0 && i < 16) D[i] = 0;
  __syncthreads();
  atomicAdd(&s[0], a);
  atomicMax(&s[1], a);
  atomicMin(&s[2], a);
  atomicOr(&s[3], a & 0xff00ff);
  atomicAnd(&s[4], a | 0xff00ff);
  atomicXor(&s[5], a);
  atomicMax((int*)&s[6], (int)a);
  atomicMin((int*)&s[7], (int)a);
  atomicInc(&s[8], 99);
  atomicDec(&s[9], 6);
  do {
    old = s[10];
  } while (atomicCAS(&s[10], old, old + (a & 15)) != old);
  atomicAdd(&t[0], (u64)a << 9);
  atomicMax(&t[1], (u64)a << 20);
  atomicExch(&s[11], 77u);
  atomicAdd(&f[0], (float)(a & 1023));
  atomicAdd(&f[1], -0.25f * (a & 7));
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(shared_address(&s[12])), "r"(a & 3) : "memory");
  u32 ticket = atomicAdd(&s[13], 1);  // every number once, in any order
  __syncthreads();
  __shared__ u32 seen[256];
  seen[ticket] = ticket * 3 + 1;
  __syncthreads();
  if (i < 16) W[256 * 4 + i] = s[i];
  if (i < 4) W[256 * 4 + 16 + i] = t[i];
  if (i < 2) W[256 * 4 + 20 + i] = __float_as_uint(f[i]);
  W[i] = seen[i];
  // global memory, an address of its own per thread: what is returned is determined
  u32* g = D + 16 + i;
  *g = a;
  u32 r0 = atomicAdd(g, 5u), r1 = atomicExch(g, a ^ 0xffu), r2 = atomicCAS(g, a ^ 0xffu, a * 3), r3 = atomicSub(g, 9u);
  W[256 + i] = (u64)r0 << 32 | r1;
  W[512 + i] = (u64)r2 << 32 | r3;
  float old_f;
  float* h = (float*)(D + 16 + 256 + i);
  *h = 1.5f;
  asm volatile("atom.global.add.f32 %0, [%1], %2;" : "=f"(old_f) : "l"(h), "f"(__uint_as_float(a)) : "memory");
  asm volatile("red.global.add.noftz.bf16x2 [%0], %1;" ::"l"(D + 16 + i), "r"(a) : "memory");
  W[768 + i] = __float_as_uint(old_f);
}
