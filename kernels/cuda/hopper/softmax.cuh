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

// The factors of this thread's columns of a key tile.
struct Factors {
  float2 of[16];
};

__device__ __forceinline__ void load_factors(Factors& to, const float* factors) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 16; ++i) to.of[i] = *reinterpret_cast<const float2*>(factors + 8 * i + column);
}

// Scores to scaled scores, acc 2^eK, with NaN for hidden keys: those whose factor is NaN.
__device__ __forceinline__ void scale_scores(float (&s)[64], const Factors& factors) {
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = __fmul_rn(s[i], i % 2 == 0 ? factors.of[i / 4].x : factors.of[i / 4].y);
}

// NaN for the keys past last[h], of the elements FROM to TO.
template <int FROM, int TO>
__device__ __forceinline__ void hide_scores(float (&s)[64], const int (&last)[2]) {
  uint32_t seen[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    seen[h] = uint32_t(last[h] - 2 * int(threadIdx.x % 4));
    ptx::keep(seen[h]);  // so that constants are compared with it, not 64 sums with last[h]
  }
#pragma unroll
  for (int i = FROM; i < TO; ++i) {
    if (8 * (i / 4) + i % 2 > int(seen[i / 2 % 2])) s[i] = not_a_number();
  }
}

// Slow: from acc 2^eK to S, which may overflow. The row sees the keys up to last[h] that have a factor.
__device__ __forceinline__ void saturate_scores(float (&s)[64], const float* factors, const int (&last)[2],
                                                QueryRows& rows) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int key = 8 * (i / 4) + i % 2 + column, h = i / 2 % 2;
    const bool hidden = factors[key] != factors[key] || key > last[h];
    s[i] = __fmul_rn(s[i], rows.factor[h]);
    if (!hidden && !(s[i] < __uint_as_float(0x7F800000u))) rows.lost |= 1u << h;
    if (!hidden && s[i] < -LARGEST) s[i] = -LARGEST;
  }
}

// The largest of a row, over the four lanes that share it, of the first TO elements; NaN counts as nothing.
template <int TO>
__device__ __forceinline__ void find_largest(const float (&s)[64], float (&largest)[2]) {
  largest[0] = largest[1] = minus_infinity();
#pragma unroll
  for (int i = 0; i < TO; ++i) largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], s[i]);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
      largest[h] = fmaxf(largest[h], __uint_as_float(ptx::shfl_bfly(__float_as_uint(largest[h]), lanes)));
    }
  }
}

// Note [Maximum of bits]
// ~~~~~~~~~~~~~~~~~~~~~~
// Hopper takes the maximum of three integers at a time, but of two FP32 numbers. Bits of FP32 numbers, as signed
// integers, order the positive ones as they are, above all negative ones and below NaN. So if the largest is neither
// negative nor NaN, it is that of the numbers. Elsewhere it says so, and the maximum must be found otherwise.

// The same, if it returns true in every lane.
__device__ __forceinline__ bool find_largest_bits(const float (&s)[64], float (&largest)[2]) {
  int bits[4];  // of the row h, two chains each, which need not wait for one another
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float* const x = s + 32 * (c / 2) + 2 * (c % 2);
    bits[c] = max(__float_as_int(x[0]), __float_as_int(x[1]));
#pragma unroll
    for (int i = 4; i < 32; i += 4) bits[c] = max(max(bits[c], __float_as_int(x[i])), __float_as_int(x[i + 1]));
  }
  bits[0] = max(bits[0], bits[2]);
  bits[1] = max(bits[1], bits[3]);
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    const uint32_t others[2] = {ptx::shfl_bfly(uint32_t(bits[0]), lanes), ptx::shfl_bfly(uint32_t(bits[1]), lanes)};
#pragma unroll
    for (int h = 0; h < 2; ++h) bits[h] = max(bits[h], int(others[h]));
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) largest[h] = __int_as_float(bits[h]);
  return uint32_t(bits[0]) < 0x7F800000u && uint32_t(bits[1]) < 0x7F800000u;
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

// E4M3 codes of the four elements x[2 h + c] of 8 columns: bytes row 0, row 1, row 0, row 1.
__device__ __forceinline__ uint32_t pack_codes(const float* x) {
  return ptx::cvt_rn_satfinite_e4m3x2_f32(x[2], x[0]) | ptx::cvt_rn_satfinite_e4m3x2_f32(x[3], x[1]) << 16;
}

// Those of row h as two bfloat16 numbers, times 2^-120: a code's bits, moved to where bfloat16 has exponent and
// mantissa, are that, subnormals too.
template <int H>
__device__ __forceinline__ uint32_t expand_codes(uint32_t codes) {
  return H == 0 ? (codes & 0x00FF00FFu) << 4 : codes >> 4 & 0x0FF00FF0u;
}
constexpr uint32_t EXPANDED_SCALE = 0x7B807B80u;  // 2^120 twice

// How P is computed: by Note [Clamp by saturation]; for higher tops, and where P is not rounded to E4M3, by Note [Floor
// by a magic addend]; by Note [Usual and unusual exponents].
enum class Way { SATURATED, CLAMPED, SLOW };

// Blocks of 8 columns whose exponentials are computed side by side: several independent chains keep the machine busy.
constexpr int AT_ONCE = 4;

// P of AT_ONCE blocks of scaled scores, from block i on, rounded: in E4M3 a word for each, codes of row 0, row 1, row
// 0, row 1 of each 8 columns; else two words of bfloat16 pairs.
template <bool E4M3, Way WAY>
__device__ __forceinline__ void round_blocks(uint32_t* held, const float* s, const float (&top)[2],
                                             const QueryRows& rows) {
  constexpr int N = 4 * AT_ONCE;
  float y[N], c[N], k[N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int h = j / 2 % 2;
    y[j] = s[j];
    c[j] = WAY == Way::SATURATED ? __fmul_rn(rows.scaled[h], UNIT) : rows.scaled[h];
    k[j] = WAY == Way::SATURATED ? saturation_addend(top[h]) : __fsub_rn(MAGIC + 8.0f, top[h]);
  }
  if constexpr (WAY == Way::SLOW) {
#pragma unroll
    for (int j = 0; j < N; ++j) y[j] = exp2_slow(y[j], rows.c, top[j / 2 % 2]);
  } else if constexpr (WAY == Way::SATURATED) {
    exp2_saturated(y, c, k);
  } else {
    exp2_shifted(y, c, k, E4M3 ? LIMIT_E4M3 : LIMIT_BF16);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (!E4M3 && s[j] != s[j]) y[j] = 0.0f;
    }
  }
#pragma unroll
  for (int j = 0; j < AT_ONCE; ++j) {
    const float* const x = y + 4 * j;
    if constexpr (E4M3) {
      held[j] = pack_codes(x);
    } else {
      held[2 * j] = ptx::cvt_rn_bf16x2_f32(x[1], x[0]);
      held[2 * j + 1] = ptx::cvt_rn_bf16x2_f32(x[3], x[2]);
    }
  }
}

// What P's elements are multiplied by as operand A of the tokens' contraction: 2^(top - 8 - M), the tile's scale
// factor, which is 0 below 2^-127; twice, in bfloat16. `below`: top - M. Expanded codes: 2^120 more.
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
    a[2 * j] = ptx::mul_rn_bf16x2(E4M3 ? expand_codes<0>(held[j]) : held[2 * j], scale[0]);
    a[2 * j + 1] = ptx::mul_rn_bf16x2(E4M3 ? expand_codes<1>(held[j]) : held[2 * j + 1], scale[1]);
  }
}

// P' of the diagonal tile as operand A: V1's exponents folded in, Note [Fold tile]. `a` holds P's codes as they are,
// and becomes P'. `row` is the tile's row of h = 0; that of h = 1 is 8 further.
__device__ __forceinline__ void fold_p(uint32_t (&a)[32], const float (&below)[2], int row, const float* fold) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int b = 0; b < layout::BLOCKS; ++b) {
    if (layout::BLOCK * b > int(ptx::shfl_idx(row, 0)) + 15) break;  // no row of this warp's sees the block: P is 0
    float inverse[2];                                                  // 2^-E
    uint32_t scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int last = min(max(row + 8 * h, layout::BLOCK * b), layout::BLOCK * b + layout::BLOCK - 1);
      const float largest = fold[layout::TILE + last];
      inverse[h] = largest == 127.0f ? __uint_as_float(0x00400000u) : exp2_integer(-largest);
      scale[h] = below[h] >= -119.0f ? operand_scale<false>(__fadd_rn(below[h], largest)) : 0;
    }
#pragma unroll
    for (int i = 4 * b; i < 4 * b + 4; ++i) {
      const float2 power = *reinterpret_cast<const float2*>(fold + 8 * i + column);
      float x[4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t p = a[2 * i + h];
        // a hidden key, whose P is 0, may have a larger exponent
        x[2 * h] = __fmul_rn(__uint_as_float(p << 16), fminf(__fmul_rn(power.x, inverse[h]), 1.0f));
        x[2 * h + 1] = __fmul_rn(__uint_as_float(p & 0xFFFF0000u), fminf(__fmul_rn(power.y, inverse[h]), 1.0f));
      }
      a[2 * i] = ptx::mul_rn_bf16x2(expand_codes<0>(pack_codes(x)), EXPANDED_SCALE);
      a[2 * i + 1] = ptx::mul_rn_bf16x2(expand_codes<1>(pack_codes(x)), EXPANDED_SCALE);
      a[2 * i] = ptx::mul_rn_bf16x2(a[2 * i], scale[0]);
      a[2 * i + 1] = ptx::mul_rn_bf16x2(a[2 * i + 1], scale[1]);
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

// Whether all do; asked first without the zeros, which takes two instructions for each.
template <int N>
__device__ __forceinline__ bool divides_fast(const float (&x)[N]) {
  uint32_t least = 0xFFFFFFFFu, largest = 0;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const uint32_t a = __float_as_uint(x[i]) << 1, b = __float_as_uint(x[i + 1]) << 1;
    least = min(min(least, a), b);
    largest = max(max(largest, a), b);
  }
  bool fast = least >= __float_as_uint(0x1p-80f) << 1 && largest <= __float_as_uint(0x1p120f) << 1;
  if (ptx::vote_any(!fast)) {
    fast = true;
#pragma unroll
    for (int i = 0; i < N; ++i) fast &= divides_fast(x[i]);
  }
  return !ptx::vote_any(!fast);
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
