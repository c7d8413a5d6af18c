// From a row of scores to P: Note [Probabilities] of flamia.reference.probabilities, for the row that a thread owns.
//
// Note [Floor by a magic addend]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Let m = ceil(c max S), |m| < 2^21, and K = 1.5 * 2^23 + 8 - m. For m - 2^20 <= c S <= m the FP32 numbers around c S +
// K are the integers, so t = fma(S, c, K) rounded down is floor(c S) + K exactly: one instruction gives the floor and,
// in its low bits, the exponent r + 8 - m that P is held with. f = fma(S, c, K - t) is the fraction, rounded once; p is
// a quadratic of it, and adding t << 23 to p's bits scales it.
//
// S is first raised to (m - 24) / c, give or take an octave: whatever lies below has r <= m - 19, and its P rounds to
// zero in E4M3. So no exponent wraps, and a score of -inf, which hides a key, gives exactly 0.
//
// Two scores go through each instruction (f32x2); with the maximum, that is five and a half issue slots per element.
//
// Note [Slow rows]
// ~~~~~~~~~~~~~~~~
// The maximum is taken with max.NaN. Where it is NaN or |m| >= 2^21, and where a constant of the call is unusual, the
// warp does what the reference says, operation by operation, four columns at a time. Both ways give the same bits where
// both apply, so the choice shows nowhere. It depends on scores that the warp's rows see, and on constants.
#pragma once

#include "blackwell/chip.cuh"
#include "blackwell/layout.cuh"
#include "common/formats.cuh"

namespace blackwell {

constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23
constexpr float MAX_TOP = 2097152.0f;  // 2^21
constexpr float LARGE = 8388608.0f;  // 2^23, from where FP32 numbers are integers
constexpr uint32_t P_NAN = 0x7F;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7FC00000u); }

// 2^e for an integer -126 <= e <= 127.
__device__ __forceinline__ float exp2_integer(float e) {
  return __uint_as_float((__float_as_uint(__fadd_rn(e, MAGIC + 127.0f)) & 0xFF) << 23);
}

// The E8M0 byte of 2^e for an integer e; NaN gives 255.
__device__ __forceinline__ uint32_t scale_byte(float e) {
  return e != e ? formats::E8M0_NAN : uint32_t(int(fminf(fmaxf(e, -127.0f), 127.0f)) + 127);
}

// What all rows of a call share.
struct Constants {
  float c;            // softmax constant
  float inverse_c;    // about 1 / c
  float score_factor;  // S is multiplied by it, in FP32
  bool usual;         // c is from 2^-100 to 2^100, and score_factor is 1
};

// Scores in columns past `last` become -inf, where they are.
__device__ __forceinline__ void hide(uint32_t from, int last) {
#pragma unroll 1
  for (int first = 0; first < 128; first += 32) {
    if (!ptx::vote_any(last < first + 31)) continue;
    float s[32];
    ptx::tcgen05_ld_x32(s, from + first);
    ptx::tcgen05_wait_ld();
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = first + i > last ? minus_infinity() : s[i];
    ptx::tcgen05_st_x32(from + first, s);
  }
  ptx::tcgen05_wait_st();
}

// The largest of a row; NaN if one is.
__device__ __forceinline__ float largest_of(const float (&s)[128]) {
  float x[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
  for (int i = 4; i + 8 <= 128; i += 8) {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = ptx::max_nan_f32(x[j], s[i + 2 * j], s[i + 2 * j + 1]);
  }
  x[0] = ptx::max_nan_f32(x[0], s[124], s[125]);
  x[1] = ptx::max_nan_f32(x[1], s[126], s[127]);
  return ptx::max_nan_f32(ptx::max_nan_f32(x[0], x[1], x[2]), x[3], x[3]);
}

// ceil(c S), exact for |c S| < 2^22; elsewhere 2^22 or more in magnitude, or NaN.
__device__ __forceinline__ float ceil_product(float s, float c) { return __fsub_rn(__fmaf_ru(s, c, MAGIC), MAGIC); }

// p of Note [FMA exponential] of flamia.reference.exp2, twice.
__device__ __forceinline__ uint64_t exp2_mantissa(uint64_t f) {
  const uint64_t c2 = ptx::pack_f32x2(0x1.5cp-2f, 0x1.5cp-2f), c1 = ptx::pack_f32x2(0x1.52p-1f, 0x1.52p-1f);
  return ptx::fma_rn_f32x2(ptx::fma_rn_f32x2(c2, f, c1), f, ptx::pack_f32x2(1.0f, 1.0f));
}

// P of two scores before it is rounded: Note [Floor by a magic addend].
__device__ __forceinline__ float2 exp2_shifted(float a, float b, uint64_t c, uint64_t k, float low) {
  const uint64_t s = ptx::pack_f32x2(fmaxf(a, low), fmaxf(b, low));
  const uint64_t t = ptx::fma_rm_f32x2(s, c, k);
  const uint64_t f = ptx::fma_rn_f32x2(s, c, ptx::sub_rn_f32x2(k, t));
  const float2 p = ptx::unpack_f32x2(exp2_mantissa(f)), exponent = ptx::unpack_f32x2(t);
  return make_float2(__uint_as_float(__float_as_uint(p.x) + (__float_as_uint(exponent.x) << 23)),
                     __uint_as_float(__float_as_uint(p.y) + (__float_as_uint(exponent.y) << 23)));
}

// Of every 16 score pairs, how many go through ex2.approx. The bits are then those of no contract.
#if defined(EXP2_IS_HARDWARE)
constexpr int HARDWARE_PAIRS_OF_16 = Chip::HARDWARE_PAIRS_OF_16;
#else
constexpr int HARDWARE_PAIRS_OF_16 = 0;
#endif
static_assert(HARDWARE_PAIRS_OF_16 >= 0 && HARDWARE_PAIRS_OF_16 <= 16, "a share of 16 pairs");

// P of a row against the integer `top`, four codes to a word, to the columns from `to` on.
__device__ __forceinline__ void round_row(uint32_t to, const float (&s)[128], float top, const Constants& g) {
  const float shift = __fsub_rn(8.0f, top), k = __fadd_rn(MAGIC, shift);
  const float low = __fmul_rn(__fsub_rn(top, 24.0f), g.inverse_c);
  const uint64_t cc = ptx::pack_f32x2(g.c, g.c), kk = ptx::pack_f32x2(k, k), shifts = ptx::pack_f32x2(shift, shift);
  uint32_t p[8];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    float2 y[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float a = s[4 * i + 2 * j], b = s[4 * i + 2 * j + 1];
      if ((2 * i + j) * HARDWARE_PAIRS_OF_16 % 16 < HARDWARE_PAIRS_OF_16) {  // spread evenly
        const float2 x = ptx::unpack_f32x2(ptx::fma_rn_f32x2(ptx::pack_f32x2(a, b), cc, shifts));
        y[j] = make_float2(ptx::ex2_approx_f32(x.x), ptx::ex2_approx_f32(x.y));
      } else {
        y[j] = exp2_shifted(a, b, cc, kk, low);
      }
    }
    p[i % 8] = ptx::cvt_rn_satfinite_e4m3x2_f32_twice(y[0].x, y[0].y, y[1].x, y[1].y);
    if (i % 8 == 7) ptx::tcgen05_st_x8(to + i - 7, p);
  }
}

// ---- slow rows -------------------------------------------------------------------------------------------------

constexpr float LARGEST = 3.40282346638528859812e38f;

// c S in FP32 where that is an integer: it saturates, but an infinite score gives NaN.
__device__ __forceinline__ float large_product(float s, float c) {
  const float x = __fmul_rn(c, s);
  if (!(fabsf(x) > LARGEST)) return x;
  return fabsf(s) > LARGEST ? not_a_number() : copysignf(LARGEST, x);
}

// ceil(c S) for any S; 0 is +0, and -inf, which no visible score is, stays.
__device__ __forceinline__ float ceil_any(float s, float c) {
  if (s == minus_infinity()) return s;
  return __fadd_rn(fabsf(__fmul_rz(c, s)) < LARGE ? ceilf(__fmul_ru(c, s)) : large_product(s, c), 0.0f);
}

// The code of P for any visible S.
__device__ __forceinline__ uint32_t round_any(float s, float c, float top) {
  float r = large_product(s, c), f = 0.0f;
  if (fabsf(__fmul_rz(c, s)) < LARGE) {
    r = floorf(__fmul_rd(c, s));
    f = __fmaf_rn(c, s, -r);
  }
  const float exponent = __fadd_rn(__fsub_rn(r, top), 8.0f);
  if (exponent != exponent) return P_NAN;
  const float p = ptx::unpack_f32x2(exp2_mantissa(ptx::pack_f32x2(f, f))).x;
  const uint32_t shift = uint32_t(int(fminf(fmaxf(exponent, -126.0f), 8.0f))) << 23;
  return ptx::cvt_rn_satfinite_e4m3x2_f32(0.0f, __uint_as_float(__float_as_uint(p) + shift));
}

// The scores in columns 4 i .. 4 i + 3 of `from`; -inf counts as the lowest number.
__device__ __forceinline__ void reload(float (&s)[4], uint32_t from, int i, float factor) {
  uint32_t words[4];
  ptx::tcgen05_ld_x4(words, from + 4 * i);
  ptx::tcgen05_wait_ld();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    s[j] = __uint_as_float(words[j]);
    if (factor != 1.0f) s[j] = __fmul_rn(s[j], factor);
    s[j] = s[j] < -LARGEST ? -LARGEST : s[j];
  }
}

// From the scores at `from` to P at the same place, whose word i takes the place of a score that has been read; returns
// top. A row without a number has NaN, or -inf if keys are hidden from it: those count as -inf.
__device__ __forceinline__ float round_slow(uint32_t from, int last, const Constants& g) {
  float largest = last < 127 ? minus_infinity() : not_a_number();
  for (int i = 0; i < 32; ++i) {
    float s[4];
    reload(s, from, i, g.score_factor);
#pragma unroll
    for (int j = 0; j < 4; ++j) largest = 4 * i + j <= last ? fmaxf(largest, s[j]) : largest;
  }
  const float top = ceil_any(largest, g.c);
  for (int i = 0; i < 32; ++i) {
    float s[4];
    reload(s, from, i, g.score_factor);
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) word |= (4 * i + j <= last ? round_any(s[j], g.c, top) : 0) << 8 * j;
    ptx::tcgen05_st_x1(from + i, word);
  }
  return top;
}

}  // namespace blackwell
