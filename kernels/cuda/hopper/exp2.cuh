// P before it is rounded: Note [Probabilities] of flamia.reference.probabilities on the FMA pipe.
//
// Note [Floor by a magic addend]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// For an integer k with |k| < 2^20, and |c S| < 2^21, the FP32 numbers around K = 1.5 * 2^23 + k are the integers, so
// fma(S, c, K) rounded down is floor(c S) + K, exactly, and its low bits are those of the integer floor(c S) + k. With
// k = 8 - top that is the exponent that P is held with: no conversion, no subtraction. `limit`, 1.5 * 2^23 plus the
// lowest exponent, clamps it from below; a NaN takes the limit too, and f = 0, p = 1 there, so that with limit
// 1.5 * 2^23 - 20 a NaN score is a hidden key: its P rounds to 0 in E4M3.
//
// Note [Clamp by saturation]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~
// The same with a clamp that costs nothing, 24 octaves further down. From 1/2 to 1 the FP32 numbers are the multiples
// of u = 2^-24. For K = 1 + u (top - 8 - 126), t = fma(S, -c u, K) rounded up is K - u floor(c S), exactly, and if it
// is saturated, 1 wherever the exponent floor(c S) + 8 - top is -126 or less; elsewhere that is (1 - t) / u - 126, and
// modulo 2^9 the integer (1 - t) / u is minus the low bits of t: those of p 2^-126 less t << 23 are the result. u f =
// fma(S, c u, t - K) is exact as f is; saturated, it is 0 below the clamp, where p becomes 1. p is computed from it
// with coefficients that take the powers of two along. A NaN score gives t = 0, whose low bits are those of 1: it takes
// the lowest exponent too, and its P rounds to 0 in E4M3. K must be below 1, so top below 134, and c u a normal number.
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

// p 2^(r + k) of N scores, given K = MAGIC + k, step by step: the machine needs several independent chains to be busy.
// s becomes the results.
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

// 2^e, for constants.
__device__ constexpr float power_of_two(int e) {
  float x = 1.0f;
  for (; e > 0; --e) x *= 2.0f;
  for (; e < 0; ++e) x *= 0.5f;
  return x;
}
constexpr float UNIT = power_of_two(-24);

// Note [Clamp by saturation]: the lowest exponent, tops from which on it cannot be used, and K.
constexpr int LOWEST = -126;
constexpr float HIGH_TOP = 8 - LOWEST;
__device__ __forceinline__ float saturation_addend(float top) {
  return __fmaf_rn(top, UNIT, 1.0f + (LOWEST - 8) * UNIT);
}

// p 2^(r + 8 - top) of N scores, given c = UNIT times the constant, and K; 2^LOWEST where it is less. s becomes the
// results.
template <int N>
__device__ __forceinline__ void exp2_saturated(float (&s)[N], const float (&c)[N], const float (&k)[N]) {
  constexpr float A = 0x1.4p-4f * power_of_two(72 + LOWEST), B = 0x1.dp-3f * power_of_two(48 + LOWEST);
  constexpr float C = 0x1.64p-1f * power_of_two(24 + LOWEST), ONE = power_of_two(LOWEST);
  float t[N], f[N], p[N];
#pragma unroll
  for (int i = 0; i < N; ++i) t[i] = ptx::fma_rp_sat_f32(s[i], -c[i], k[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) f[i] = __fsub_rn(t[i], k[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) f[i] = ptx::fma_rn_sat_f32(s[i], c[i], f[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = __fmaf_rn(A, f[i], B);
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = __fmaf_rn(p[i], f[i], C);
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = __fmaf_rn(p[i], f[i], ONE);
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = __uint_as_float(__float_as_uint(p[i]) - (__float_as_uint(t[i]) << 23));
}

// ceil(c S), exactly, under the bounds of Note [Floor by a magic addend].
__device__ __forceinline__ float ceil_product(float s, float c) { return __fsub_rn(__fmaf_ru(s, c, MAGIC), MAGIC); }

// 2^e for an integer -126 <= e <= 127.
__device__ __forceinline__ float exp2_integer(float e) {
  return __uint_as_float((__float_as_uint(__fadd_rn(e, MAGIC + 127.0f)) & 0xFF) << 23);
}

}  // namespace hopper
