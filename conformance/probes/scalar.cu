// Conversions and the FMA exponential, one element per thread, compared with flamia.reference bit for bit.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

// E4M3 code of x: to nearest even, saturating, NaN to 0x7F.
extern "C" __global__ void encode_e4m3(const float* x, u8* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x[i]));
  out[i] = (u8)pair;
}

// p(f) of Note [FMA exponential].
extern "C" __global__ void exp2_mantissa(const float* f, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float t = __fmaf_rn(0.33984375f, f[i], 0.66015625f);
  out[i] = __fmaf_rn(t, f[i], 1.0f);
}

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)

// E8M0 byte of |x|, rounded up, saturating.
extern "C" __global__ void encode_e8m0(const float* x, u8* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u16 pair;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x[i]));
  out[i] = (u8)pair;
}

// E2M1 code of x, to nearest even, saturating.
extern "C" __global__ void encode_e2m1(const float* x, u8* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  u32 code;
  asm("{\n .reg .b8 pair;\n cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2;\n cvt.u32.u8 %0, pair;\n}"
      : "=r"(code) : "f"(0.0f), "f"(x[i]));
  out[i] = (u8)(code & 15);
}

#endif
