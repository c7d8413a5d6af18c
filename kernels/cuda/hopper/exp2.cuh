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
  return __fmaf_rn(__fmaf_rn(0x1.5cp-2f, f, 0x1.52p-1f), f, 1.0f);
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
  for (int i = 0; i < N; ++i) p[i] = __fmaf_rn(0x1.5cp-2f, f[i], 0x1.52p-1f);
#pragma unroll
  for (int i = 0; i < N; ++i) t[i] = fmaxf(t[i], limit);
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
  constexpr float A = 0x1.5cp-2f * power_of_two(48 + LOWEST), B = 0x1.52p-1f * power_of_two(24 + LOWEST);
  constexpr float ONE = power_of_two(LOWEST);
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
  for (int i = 0; i < N; ++i) p[i] = __fmaf_rn(p[i], f[i], ONE);
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = __uint_as_float(__float_as_uint(p[i]) - (__float_as_uint(t[i]) << 23));
}

// Note [Bits of P]
// ~~~~~~~~~~~~~~~~
// P of Note [Own exponents] of flamia.reference.probabilities has a significand of F fraction bits and bfloat16's
// exponent, field = r - top + 127: its bits are n << (7 - F), n = 2^F field + k, k = 2^F (p - 1) rounded to an integer.
// With K = 1 + u (top - 127) the floor of Note [Clamp by saturation] is t = 1 - u max(field, 0). FP32 numbers below
// 2^-126 are the multiples of 2^-149, and their bits say which: in these units, z = 2^F max(field, 0) is an FMA of t,
// and the last FMA of p, scaled so that its result is z + 2^F (p - 1), rounds it once, to n. Nothing is shifted, masked
// or added as an integer. Where field < 0, u f is saturated to 0 and z = 0: n = 0. A NaN score (t = 0, u f = 0) gives a
// power of two whose low 16 bits are 0, so the low 16 bits are n everywhere. top = +inf gives n = 0, top = -inf bits
// without meaning. It needs top < BITS_TOP, |c S| < 2^21, and c u normal.
constexpr float BITS_TOP = 127.0f;

// K.
__device__ __forceinline__ float bits_addend(float top) { return __fmaf_rn(top, UNIT, 1.0f - 127 * UNIT); }

// n of N scores, given c = UNIT times the constant, and K.
template <int F, int N>
__device__ __forceinline__ void exp2_bits(uint32_t (&n)[N], const float (&s)[N], const float (&c)[N],
                                          const float (&k)[N]) {
  constexpr float Z = power_of_two(F - 149 + 24);
  constexpr float A = 0x1.5cp-2f * power_of_two(F - 149 + 48), B = 0x1.52p-1f * Z;
  float t[N], f[N], p[N];
#pragma unroll
  for (int i = 0; i < N; ++i) t[i] = ptx::fma_rp_sat_f32(s[i], -c[i], k[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) f[i] = __fsub_rn(t[i], k[i]);
#pragma unroll
  for (int i = 0; i < N; ++i) f[i] = ptx::fma_rn_sat_f32(s[i], c[i], f[i]);  // u f
#pragma unroll
  for (int i = 0; i < N; ++i) t[i] = __fmaf_rn(t[i], -Z, Z);
#pragma unroll
  for (int i = 0; i < N; ++i) p[i] = __fmaf_rn(A, f[i], B);
#pragma unroll
  for (int i = 0; i < N; ++i) n[i] = __float_as_uint(__fmaf_rn(p[i], f[i], t[i]));
}

// Two of them as a pair of bfloat16 numbers, the first in the low half; their upper halves are ignored.
template <int F>
__device__ __forceinline__ uint32_t pair_bits(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x5410) << (7 - F);
}

// The same without a half-rate instruction, if neither is that of a NaN. 16 times a number that small is its bits,
// shifted.
template <int F>
__device__ __forceinline__ uint32_t pair_numbers(uint32_t first, uint32_t second) {
  constexpr int SHIFT = 7 - F;
  return (second << (16 + SHIFT)) + __float_as_uint(__fmul_rn(__uint_as_float(first), float(1 << SHIFT)));
}

// n as the FP32 number P.
template <int F>
__device__ __forceinline__ float number_of_bits(uint32_t n) {
  return __uint_as_float(n << (23 - F));
}

// ceil(c S), exactly, under the bounds of Note [Floor by a magic addend].
__device__ __forceinline__ float ceil_product(float s, float c) { return __fsub_rn(__fmaf_ru(s, c, MAGIC), MAGIC); }

// 2^e for an integer -126 <= e <= 127.
__device__ __forceinline__ float exp2_integer(float e) {
  return __uint_as_float((__float_as_uint(__fadd_rn(e, MAGIC + 127.0f)) & 0xFF) << 23);
}

}  // namespace hopper
