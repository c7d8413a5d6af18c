// P before it is rounded: Note [Probabilities] of flamia.reference.probabilities on the FMA pipe.
//
// Note [Floor by a magic addend]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// For an integer k with |k| < 2^20, and |c S| < 2^21, the FP32 numbers around K = 1.5 * 2^23 + k are the integers, so
// fma(S, c, K) rounded down is floor(c S) + K, exactly, and its low bits are those of the integer floor(c S) + k. With
// k = 8 - top that is the exponent that P is held with: no conversion, no subtraction. `limit`, 1.5 * 2^23 plus the
// lowest exponent, clamps it from below; a NaN takes the limit too, and f = 0, p = 1 there, so that with limit
// 1.5 * 2^23 - 20 a NaN score is a hidden key: its P rounds to 0 in E4M3.
#pragma once

#include "hopper/ptx.cuh"

namespace hopper {

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
constexpr float LIMIT_E4M3 = MAGIC - 20.0f;
constexpr float LIMIT_BF16 = MAGIC - 126.0f;  // FLOOR_EXPONENT of the reference

// p of Note [FMA exponential] of flamia.reference.exp2.
__device__ __forceinline__ float exp2_mantissa(float f) {
  const float t = __fmaf_rn(0x1.4p-4f, f, 0x1.dp-3f);
  const float u = __fmaf_rn(t, f, 0x1.64p-1f);
  return __fmaf_rn(u, f, 1.0f);
}

// p 2^(r + k) for x = c S, given K = MAGIC + k.
__device__ __forceinline__ float exp2_shifted(float s, float c, float k, float limit) {
  const float t = __fmaf_rd(s, c, k);
  const float f = ptx::fma_rn_sat_f32(s, c, __fsub_rn(k, t));
  const float p = exp2_mantissa(f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(fmaxf(t, limit)) << 23));
}

// The same of N scores, step by step: the machine needs several independent chains to be busy. s becomes the results.
template <int N>
__device__ __forceinline__ void exp2_shifted(float (&s)[N], const float (&c)[N], const float (&k)[N], float limit) {
  float t[N], f[N], p[N];
#pragma unroll
  for (int i = 0; i < N; ++i) t[i] = __fmaf_rd(s[i], c[i], k[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) f[i] = __fsub_rn(k[i], t[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) f[i] = ptx::fma_rn_sat_f32(s[i], c[i], f[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = __fmaf_rn(0x1.4p-4f, f[i], 0x1.dp-3f);
#pragma unroll
  for (int i = 0; i < N; ++i) t[i] = fmaxf(t[i], limit);
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = __fmaf_rn(p[i], f[i], 0x1.64p-1f);
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = __fmaf_rn(p[i], f[i], 1.0f);
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = __uint_as_float(__float_as_uint(p[i]) + (__float_as_uint(t[i]) << 23));
}

// ceil(c S), exactly, under the same bounds.
__device__ __forceinline__ float ceil_product(float s, float c) { return __fsub_rn(__fmaf_ru(s, c, MAGIC), MAGIC); }

// 2^e for an integer -126 <= e <= 127.
__device__ __forceinline__ float exp2_integer(float e) {
  return __uint_as_float((__float_as_uint(__fadd_rn(e, MAGIC + 127.0f)) & 0xFF) << 23);
}

}  // namespace hopper
