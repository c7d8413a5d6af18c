// From the scores of 64 query rows and one key tile to P, in registers: steps 1 to 3 of Note [Forward] of
// flamia.reference.forward for the two rows, h = 0 and 1, that a thread has in an accumulator.
//
// Note [Usual and unusual exponents]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// The reference computes S = (acc * 2^eK) * 2^eQ and takes c S exactly. Where all exponents are moderate, these
// products are exact, so 2^eQ may as well multiply c once per row, and c S stays below 2^21 (Note [Floor by a magic
// addend]). Where they are not, the slow path does what the reference says, operation by operation. Which path a query
// tile takes is decided from the exponents of its rows and keys alone; both give the same bits where both apply. P is
// computed so, too, from where M is not below BITS_TOP.
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
  float c[2];      // softmax constant, times 2^eQ unless the path is slow
  float top[2];    // M
  uint32_t flags;  // bit h: P of row h is NaN; SLOW: P must be computed by `make_pairs_slow`
};
constexpr uint32_t SLOW = 4;

// The factors of this thread's columns of a key tile.
struct Factors {
  float of[32];
};

__device__ __forceinline__ void load_factors(Factors& to, const float* factors) {
  const float* const own = factors + threadIdx.x % 4 * 4;
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(own + 4 * i);
    to.of[i] = four.x, to.of[i + 1] = four.y, to.of[i + 2] = four.z, to.of[i + 3] = four.w;
  }
}

// Scores to scaled scores, acc 2^eK, with NaN for hidden keys: those whose factor is NaN.
__device__ __forceinline__ void scale_scores(float (&s)[64], const Factors& factors) {
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = __fmul_rn(s[i], factors.of[i / 4 * 2 + i % 2]);
}

// -inf for the keys past last[h], of the elements FROM to TO.
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
    if (8 * (i / 4) + i % 2 > int(seen[i / 2 % 2])) s[i] = minus_infinity();
  }
}

// -inf for NaN.
__device__ __forceinline__ void hide_nan(float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = fmaxf(s[i], minus_infinity());
}

// Slow: from acc 2^eK to S, which may overflow. The row sees the keys up to last[h] that have a factor.
__device__ __forceinline__ void saturate_scores(float (&s)[64], const float* factors, const int (&last)[2],
                                                const float (&of_row)[2], QueryRows& rows) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int key = 8 * (i / 4) + i % 2 + column, h = i / 2 % 2;
    const float factor = factors[factor_word(key)];
    const bool hidden = factor != factor || key > last[h];
    s[i] = __fmul_rn(s[i], of_row[h]);
    if (!hidden && !(s[i] < __uint_as_float(0x7F800000u))) rows.flags |= 1u << h;
    s[i] = hidden ? minus_infinity() : fmaxf(s[i], -LARGEST);
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
// negative nor NaN, it is that of the numbers. If it is negative, so are all numbers, and where M >= 0 that is enough to
// know: M does not grow. Elsewhere the maximum is found otherwise.

// Of a row, over the four lanes that share it, the number with the largest bits.
__device__ __forceinline__ void find_largest_bits(const float (&s)[64], float (&largest)[2]) {
  int bits[4];  // of the row h, two chains each, which need not wait for one another
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float* const x = s + 32 * (c / 2) + 2 * (c % 2);
    bits[c] = max(__float_as_int(x[0]), __float_as_int(x[1]));
#pragma unroll
    for (int i = 4; i < 32; i += 4) bits[c] = max(max(bits[c], __float_as_int(x[i])), __float_as_int(x[i + 1]));
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) bits[h] = max(bits[h], bits[2 + h]);
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    const uint32_t others[2] = {ptx::shfl_bfly(uint32_t(bits[0]), lanes), ptx::shfl_bfly(uint32_t(bits[1]), lanes)};
#pragma unroll
    for (int h = 0; h < 2; ++h) bits[h] = max(bits[h], int(others[h]));
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) largest[h] = __int_as_float(bits[h]);
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

// n of Note [Bits of P] for any S and top; 0 for a hidden key.
template <int F>
__device__ __forceinline__ uint32_t bits_slow(float s, float c, float top) {
  float r = multiply_large(s, c), f = 0.0f;
  if (fabsf(__fmul_rz(c, s)) < LARGE) {
    r = floorf(__fmul_rd(c, s));
    f = __fmaf_rn(c, s, -r);
  }
  const float field = __fadd_rn(__fsub_rn(r, top), 127.0f);
  const float t = __fmaf_rn(0x1.5cp-2f, f, 0x1.52p-1f), rounded = __fmaf_rn(t, f, MAGIC / float(1 << F));
  const uint32_t n = (uint32_t(int(fminf(field, 128.0f))) << F) + (__float_as_uint(rounded) & 0xFF);
  return field >= 0.0f && s >= -LARGEST ? n : 0;
}

// P of N blocks of 8 columns as operand A, from scaled scores.
template <int F, int N>
__device__ __forceinline__ void make_pairs(uint32_t* a, const float* s, const QueryRows& rows) {
  float x[4 * N], c[4 * N], k[4 * N];
  uint32_t n[4 * N];
#pragma unroll
  for (int i = 0; i < 4 * N; ++i) {
    const int h = i / 2 % 2;
    x[i] = s[i];
    c[i] = __fmul_rn(rows.c[h], UNIT);
    k[i] = bits_addend(rows.top[h]);
  }
  exp2_bits<F>(n, x, c, k);
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) a[i] = pair_numbers<F>(n[2 * i], n[2 * i + 1]);
}

// The same, operation by operation, and one after the other: it shall take no registers from what is not rare.
template <int F, int N>
__device__ __forceinline__ void make_pairs_slow(uint32_t* a, const float* s, const QueryRows& rows) {
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) {
    const float c = rows.c[i % 2], top = rows.top[i % 2];
    a[i] = pair_bits<F>(bits_slow<F>(s[2 * i], c, top), bits_slow<F>(s[2 * i + 1], c, top));
    ptx::keep(a[i]);
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
