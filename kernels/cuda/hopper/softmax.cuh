// From the scores of 64 query rows and one key tile to P, in registers: steps 1 to 3 of Note [Forward] of
// flamia.reference.forward for the two rows, h = 0 and 1, that a thread has in an accumulator.
//
// Note [Usual and unusual exponents]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The reference computes S = (acc * 2^eK) * 2^eQ and takes c S exactly. Where all exponents are moderate, these
// products are exact, so 2^eQ may as well multiply c once per row, and c S stays below 2^21 (Note [Floor by a magic
// addend]).
// Where they are not, the slow path does what the reference says, operation by operation. Which path a query tile
// takes is decided from the exponents of its rows and keys alone; both give the same bits where both apply.
#pragma once

#include "common/formats.cuh"
#include "hopper/exp2.cuh"
#include "hopper/factors.cuh"

namespace hopper {

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7FC00000u); }
__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }
constexpr float LARGEST = 3.40282346638528859812e38f;
constexpr float LARGE = 8388608.0f;  // 2^23, from where FP32 numbers are integers

// What a thread knows of its two query rows.
struct QueryRows {
  float c;          // softmax constant
  float factor[2];  // 2^eQ
  float scaled[2];  // c 2^eQ
  float top[2];     // M
  uint32_t lost;    // bit h: P of row h is NaN
};

// The largest of a row, over the four lanes that share it.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __uint_as_float(ptx::shfl_bfly(__float_as_uint(x), 1)));
  return fmaxf(x, __uint_as_float(ptx::shfl_bfly(__float_as_uint(x), 2)));
}

// Scores to scaled scores (usual: acc 2^eK; slow: S), with NaN for hidden keys: those whose factor is NaN, and, if
// MASKED, those past last[h]. `largest`: of each row.
template <bool SLOW, bool MASKED>
__device__ __forceinline__ void scale_scores(float (&s)[64], const float* factors, const int (&last)[2],
                                             QueryRows& rows, float (&largest)[2]) {
  const int column = 2 * (threadIdx.x % 4);
  largest[0] = largest[1] = minus_infinity();
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * i + column);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& x = s[4 * i + 2 * h + j];
        const float f = j == 0 ? factor.x : factor.y;
        x = __fmul_rn(x, f);
        if (MASKED && 8 * i + column + j > last[h]) x = not_a_number();
        if constexpr (SLOW) {
          x = __fmul_rn(x, rows.factor[h]);
          const bool hidden = f != f || (MASKED && 8 * i + column + j > last[h]);
          if (!hidden && !(x < __uint_as_float(0x7F800000u))) rows.lost |= 1u << h;
          if (!hidden && x < -LARGEST) x = -LARGEST;  // it overflowed
        }
        largest[h] = fmaxf(largest[h], x);
      }
    }
  }
  largest[0] = row_max(largest[0]);
  largest[1] = row_max(largest[1]);
}

// c S where it is large: rounded, saturating.
__device__ __forceinline__ float multiply_large(float s, float c) {
  return fminf(fmaxf(__fmul_rn(c, s), -LARGEST), LARGEST);
}

// ceil(c S) for any S; -inf where every key is hidden, NaN for a score that overflowed.
__device__ __forceinline__ float ceil_slow(float s, float c) {
  if (s == minus_infinity()) return s;
  if (!(s <= LARGEST)) return not_a_number();
  return __fadd_rn(fabsf(__fmul_rz(c, s)) < LARGE ? ceilf(__fmul_ru(c, s)) : multiply_large(s, c), 0.0f);
}

// p 2^(r + 8 - top) for any S; 0 for a hidden key.
__device__ __forceinline__ float exp2_slow(float s, float c, float top) {
  const bool hidden = s != s;
  float r = multiply_large(s, c), f = 0.0f;
  if (fabsf(__fmul_rz(c, s)) < LARGE) {
    r = floorf(__fmul_rd(c, s));
    f = __fmaf_rn(c, s, -r);
  }
  const float exponent = fmaxf(__fadd_rn(__fsub_rn(r, top), 8.0f), -126.0f);
  const uint32_t shift = uint32_t(int(fminf(exponent, 8.0f))) << 23;
  return hidden ? 0.0f : __uint_as_float(__float_as_uint(exp2_mantissa(f)) + shift);
}

// What a thread holds of P: E4M3 codes, in bytes row 0, row 1, row 0, row 1 of each 8 columns, or bfloat16 pairs.
template <bool E4M3>
struct Held {
  static constexpr int WORDS = E4M3 ? 16 : 32;
};

// Blocks of 8 columns whose exponentials are computed side by side: several independent chains keep the machine busy.
constexpr int AT_ONCE = 4;

// P of AT_ONCE blocks of scaled scores, from block i on, rounded.
template <bool E4M3, bool SLOW>
__device__ __forceinline__ void round_blocks(uint32_t* held, const float* s, const float (&top)[2],
                                             const QueryRows& rows) {
  float y[4 * AT_ONCE], c[4 * AT_ONCE], shift[4 * AT_ONCE];
#pragma unroll
  for (int j = 0; j < 4 * AT_ONCE; ++j) {
    y[j] = s[j];
    c[j] = rows.scaled[j / 2 % 2];
    shift[j] = __fsub_rn(MAGIC + 8.0f, top[j / 2 % 2]);
  }
  if constexpr (SLOW) {
#pragma unroll
    for (int j = 0; j < 4 * AT_ONCE; ++j) y[j] = exp2_slow(y[j], rows.c, top[j / 2 % 2]);
  } else {
    exp2_shifted(y, c, shift, E4M3 ? LIMIT_E4M3 : LIMIT_BF16);
#pragma unroll
    for (int j = 0; j < 4 * AT_ONCE; ++j) {
      if (!E4M3 && s[j] != s[j]) y[j] = 0.0f;
    }
  }
#pragma unroll
  for (int j = 0; j < AT_ONCE; ++j) {
    const float* const x = y + 4 * j;
    if constexpr (E4M3) {
      held[j] = ptx::cvt_rn_satfinite_e4m3x2_f32(x[2], x[0]) | ptx::cvt_rn_satfinite_e4m3x2_f32(x[3], x[1]) << 16;
    } else {
      held[2 * j] = ptx::cvt_rn_bf16x2_f32(x[1], x[0]);
      held[2 * j + 1] = ptx::cvt_rn_bf16x2_f32(x[3], x[2]);
    }
  }
}

// What P's elements are multiplied by as operand A of the tokens' contraction: 2^(top - 8 - M), the tile's scale
// factor, which is 0 below 2^-127; twice, in bfloat16. `below`: top - M. A code's bits, moved to where bfloat16 has
// exponent and mantissa, are its value times 2^-120, subnormals too; so there it is 2^120 more.
template <bool E4M3>
__device__ __forceinline__ uint32_t operand_scale(float below) {
  constexpr float BIAS = MAGIC + 127.0f + (E4M3 ? 112.0f : -8.0f);
  uint32_t scale = (__float_as_uint(__fadd_rn(below, BIAS)) & 0xFF) * 0x00800080u;
  if (!E4M3 && below == -119.0f) scale = 0x00400040u;  // 2^-127 is subnormal
  return below >= -119.0f ? scale : 0;
}

// AT_ONCE blocks of P as operand A.
template <bool E4M3>
__device__ __forceinline__ void expand_blocks(uint32_t* a, const uint32_t* held, const uint32_t (&scale)[2]) {
#pragma unroll
  for (int j = 0; j < AT_ONCE; ++j) {
    a[2 * j] = ptx::mul_rn_bf16x2(E4M3 ? (held[j] & 0x00FF00FFu) << 4 : held[2 * j], scale[0]);
    a[2 * j + 1] = ptx::mul_rn_bf16x2(E4M3 ? held[j] >> 4 & 0x0FF00FF0u : held[2 * j + 1], scale[1]);
  }
}

// P' of the diagonal tile as operand A: V1's exponents folded in, Note [Fold tile]. `row` is the tile's row of h = 0;
// that of h = 1 is 8 further.
template <bool E4M3>
__device__ __forceinline__ void fold_p(uint32_t (&a)[32], const uint32_t (&held)[Held<E4M3>::WORDS],
                                       const float (&below)[2], int row, const float* fold) {
  if constexpr (!E4M3) return;  // unscaled values have the exponent 0
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int b = 0; b < layout::BLOCKS; ++b) {
    float largest[2], scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int last = min(max(row + 8 * h, layout::BLOCK * b), layout::BLOCK * b + layout::BLOCK - 1);
      largest[h] = fold[layout::TILE + last];
      const float e = __fadd_rn(__fsub_rn(below[h], 8.0f), largest[h]);
      scale[h] = e == -127.0f ? __uint_as_float(0x00400000u) : exp2_integer(fminf(e, 127.0f));
      if (e < -127.0f || below[h] < -119.0f) scale[h] = 0.0f;  // too small to be held, here or for P itself
    }
#pragma unroll
    for (int i = 4 * b; i < 4 * b + 4; ++i) {
      const float2 e = *reinterpret_cast<const float2*>(fold + 8 * i + column);
      const float2 even = formats::decode_e4m3x2(held[i]), odd = formats::decode_e4m3x2(held[i] >> 16);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float ratio[2] = {exp2_integer(fminf(fmaxf(__fsub_rn(e.x, largest[h]), -126.0f), 0.0f)),
                                exp2_integer(fminf(fmaxf(__fsub_rn(e.y, largest[h]), -126.0f), 0.0f))};
        const uint32_t codes = ptx::cvt_rn_satfinite_e4m3x2_f32(__fmul_rn(h == 0 ? odd.x : odd.y, ratio[1]),
                                                               __fmul_rn(h == 0 ? even.x : even.y, ratio[0]));
        const float2 folded = formats::decode_e4m3x2(codes);
        a[2 * i + h] = ptx::cvt_rn_bf16x2_f32(__fmul_rn(folded.y, scale[h]), __fmul_rn(folded.x, scale[h]));
      }
    }
  }
}

// ---- O / l -----------------------------------------------------------------------------------------------------
//
// Note [Division]
// ~~~~~~~~~~~~~~~
// fl(x / y), given r = fl(1 / y): with q = fl(x r) and the remainder x - q y, which an FMA gives exactly,
// fma(remainder, r, q) is correctly rounded (P. Markstein, "Computation of elementary functions on the IBM RISC
// System/6000 processor", 1990), unless something underflows or overflows. As 1/2 <= y < 2^32 for a row sum, that needs
// |x| from 2^-80 to 2^120, or x = 0. Elsewhere the same is done in binary64, whose quotient, rounded once more, is
// correct too: a quotient of two 24-bit numbers that is no tie of binary32 is further from one than 2^-52 of itself,
// and ties are exact.

// fl(1 / y): one Newton step from the approximation, as rcp.rn.f32 does it for a normal y with a normal reciprocal.
__device__ __forceinline__ float reciprocal(float y) {
  const float r = ptx::rcp_approx_f32(y);
  return __fmaf_rn(r, __fmaf_rn(-y, r, 1.0f), r);
}

__device__ __forceinline__ bool divides_fast(float x) {
  const float magnitude = fabsf(x);
  return (magnitude >= 0x1p-80f && magnitude <= 0x1p120f) || magnitude == 0.0f;
}

__device__ __forceinline__ float divide_fast(float x, float y, float r) {
  const float q = __fmul_rn(x, r);
  return __fmaf_rn(__fmaf_rn(-q, y, x), r, q);
}

__device__ __forceinline__ float divide_slow(float x, float y, float r) {
  if (!(fabsf(x) <= LARGEST)) return x;  // y is positive and finite, or the row is lost
  const double b = y;
  double inverse = r;
  inverse = __fma_rn(__fma_rn(-b, inverse, 1.0), inverse, inverse);
  inverse = __fma_rn(__fma_rn(-b, inverse, 1.0), inverse, inverse);
  const double q = __dmul_rn(x, inverse);
  return __double2float_rn(__fma_rn(__fma_rn(-q, b, double(x)), inverse, q));
}

}  // namespace hopper
