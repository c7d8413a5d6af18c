// Chains of wgmma steps on Hopper: D = A B^T + C, one warpgroup per 64 x 8 tile.
//
// A is (tiles, steps, 64, 32 bytes), B is (tiles, steps, 8, 32 bytes), rows contracted along their bytes: 16 bfloat16 or
// 32 E4M3. C and D are float (tiles, 64, 8). A goes through registers, B through shared memory in the canonical
// K-major layout without swizzle: two core matrices of 8 rows x 16 bytes, 128 bytes apart.

typedef unsigned int u32;
typedef unsigned long long u64;

#define CHAIN(NAME, INSTRUCTION, TRANSPOSE)                                                                        \
  extern "C" __global__ void __launch_bounds__(128) NAME(const u32* A, const u32* B, const float* C, float* D,     \
                                                         int steps) {                                              \
    __shared__ __align__(128) u32 shared[64];                                                                      \
    int thread = threadIdx.x, lane = thread % 32;                                                                  \
    int row = 16 * (thread / 32) + lane / 4, quad = lane % 4;                                                      \
    long tile = blockIdx.x;                                                                                        \
    long low = tile * 512 + row * 8 + 2 * quad, high = low + 64;                                                   \
    float d0 = C[low], d1 = C[low + 1], d2 = C[high], d3 = C[high + 1];                                            \
    for (int step = 0; step < steps; ++step) {                                                                     \
      const u32* a = A + (tile * steps + step) * 512 + row * 8 + quad;                                             \
      __syncthreads();                                                                                             \
      if (thread < 64) { /* word `thread % 4` of half `thread / 32` of row `thread / 4 % 8` */                     \
        int half = thread / 32, n = thread / 4 % 8, word = thread % 4;                                             \
        shared[thread] = B[(tile * steps + step) * 64 + n * 8 + half * 4 + word];                                  \
      }                                                                                                            \
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");                                                 \
      __syncthreads();                                                                                             \
      u64 address = ((u32)__cvta_generic_to_shared(shared) & 0x3FFFF) >> 4;                                        \
      u64 descriptor = address | ((u64)(128 >> 4) << 16) | ((u64)(256 >> 4) << 32);                                \
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");                                                      \
      asm volatile("{.reg .pred p; setp.ne.u32 p, 1, 0; " INSTRUCTION                                              \
                   " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1" TRANSPOSE ";}"                                      \
                   : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)                                                        \
                   : "r"(a[0]), "r"(a[64]), "r"(a[4]), "r"(a[68]), "l"(descriptor));                               \
      asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"                             \
                   : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)::"memory");                                            \
    }                                                                                                              \
    D[low] = d0;                                                                                                   \
    D[low + 1] = d1;                                                                                               \
    D[high] = d2;                                                                                                  \
    D[high + 1] = d3;                                                                                              \
  }

CHAIN(wgmma_bf16, "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16", ", 0")
CHAIN(wgmma_e4m3, "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3", "")
