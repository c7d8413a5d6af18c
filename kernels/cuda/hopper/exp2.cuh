// Integer parts of c S, and P in bits, on the FMA pipe.
//
// Note [Floor by a magic addend]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// For an integer k with |k| < 2^20, and |c S| < 2^21, the FP32 numbers around K = 1.5 * 2^23 + k are the integers, so
// fma(S, c, K) rounded down is floor(c S) + K, rounded up ceil(c S) + K, exactly, and its low bits are those of the
// integer: no conversion.
#pragma once

#include "hopper/ptx.cuh"

namespace hopper {

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23

// 2^e, for constants.
__device__ constexpr float power_of_two(int e) {
  float x = 1.0f;
  for (; e > 0; --e) x *= 2.0f;
  for (; e < 0; ++e) x *= 0.5f;
  return x;
}
constexpr float UNIT = power_of_two(-24);

// Note [Bits of P]
// ~~~~~~~~~~~~~~~~
// P of Note [Own exponents] of flamia.reference.probabilities has a significand of F fraction bits and bfloat16's
// exponent, field = r - top + 127: its bits are n << (7 - F), n = 2^F field + k, k = 2^F (p - 1) rounded to an integer.
//
// From 1/2 to 1 the FP32 numbers are the multiples of u = 2^-24. For K = 1 + u (top - 127), t = fma(S, -c u, K) rounded
// up is K - u floor(c S), exactly, and saturated at 1 it is 1 - u max(field, 0): a clamp that costs nothing. u f =
// fma(S, c u, t - K) is exact as f is; saturated at 0, it is 0 where field < 0. FP32 numbers below 2^-126 are the
// multiples of 2^-149, and their bits say which: in these units, z = 2^F max(field, 0) is an FMA of t, and the last FMA
// of p, scaled so that its result is z + 2^F (p - 1), rounds it once, to n. Nothing is shifted, masked or added as an
// integer, and where field < 0, n = 0. A NaN score (t = 0, u f = 0) gives a power of two whose low 16 bits are 0, so the
// low 16 bits are n everywhere. top = +inf gives n = 0, top = -inf bits without meaning. It needs top < BITS_TOP,
// |c S| < 2^21, and c u normal.
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

// The same, if neither is that of a NaN, without a shift: a power of two times a number that small is its bits, shifted.
template <int F>
__device__ __forceinline__ uint32_t pair_numbers(uint32_t first, uint32_t second) {
  constexpr int SHIFT = 7 - F;
  return (second << (16 + SHIFT)) + __float_as_uint(__fmul_rn(__uint_as_float(first), float(1 << SHIFT)));
}

// ceil(c S), exactly, under the bounds of Note [Floor by a magic addend].
__device__ __forceinline__ float ceil_product(float s, float c) { return __fsub_rn(__fmaf_ru(s, c, MAGIC), MAGIC); }

// 2^e for an integer -126 <= e <= 127.
__device__ __forceinline__ float exp2_integer(float e) {
  return __uint_as_float((__float_as_uint(__fadd_rn(e, MAGIC + 127.0f)) & 0xFF) << 23);
}

}  // namespace hopper
