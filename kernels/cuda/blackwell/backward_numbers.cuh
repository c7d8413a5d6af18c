// Steps 1, 3 and 4 of Note [Backward] of flamia.reference.backward for one 32x32 tile: a warp holds it, a thread one
// row.
//
// Note [Fast tiles]
// ~~~~~~~~~~~~~~~~~
// With the integer m of a query and k = MAGIC + 8 - m, the FP32 numbers around c S + k are the integers while |c S|
// and |m| are at most 2^20. So t = fma(S, c, k - 1) rounded up is n + k with n = ceil(c S) - 1, the integer below c S:
// its largest gives E = n + 1 - m, its low bits are the exponent of P, and f = fma(S, c, k - t) is c S - n, rounded
// once. For an integral c S the reference has n + 1 and f = 0 where this has n and f = 1; as p is exactly 1 at
// 0 and exactly 2 at 1, P is the same. (The owner of queries has one m to a thread, takes E from its largest S, and n
// from rounding down, Note [Floor by a magic addend] of exp2.cuh.) 2^-E is in the coefficients of p. An
// inactive query has m = 2^20: its P is 0, and it never gives the maximum. t is raised to MAGIC + E - 24, where P
// rounds to 0, so that no exponent wraps; where c |S| and |m| together are at most 100 (`REACH`), none does. E from
// -100 to 20.
//
// Powers of two commute with rounding as long as nothing leaves the normal numbers, so that X is
//   fl(v (softmax_scale 2^(E - 8 + eK - e))), v = fl(P' fma(dP, 2^eQ, -delta 2^eQ))
// with P' the codes of P and 2^e the tile's scale; as rounding is monotone, the largest |v| gives the largest |X|.
// With e' the exponent of the scale of |v| softmax_scale 2^eK, e = e' + E - 8, so that E is not in the factor of v.
// (The owner of queries has 2^eK on its columns instead: v = fl(P' fl(dP - delta)) 2^eK.) An entry that is not rounded
// to 0 has at least 2^-19 of the tile's largest X, so the tile's largest tells whether all that counts was normal:
// from about 2^-68 to 2^40 it was (`SMALLEST_X_BYTE`, `LARGEST_X_BYTE`), and from 2^-80 without 2^(E - 8)
// (`SMALLEST_BYTE`), with exponents from -30 to 8, softmax_scale from 2^-10 to 2^10, and delta 0 or from 2^-90 to 2^90.
//
// Whatever is outside, NaN first of all, takes the operations of the reference one by one (`*_slow`). Both ways give
// the same bits where both apply, so the choice shows nowhere.
#pragma once

#include "blackwell/backward_layout.cuh"
#include "blackwell/backward_store.cuh"
#include "blackwell/exp2.cuh"
#include "common/formats.cuh"

namespace blackwell::backward {

using layout::BLOCK;

constexpr float IDLE_TOP = 1048576.0f;  // 2^20
constexpr int LOWEST_E = -100, HIGHEST_E = 20;
constexpr float REACH = 100.0f;
constexpr uint32_t SMALLEST_X_BYTE = 127 - 77, LARGEST_X_BYTE = 127 + 31;  // scales of X
constexpr uint32_t SMALLEST_BYTE = 127 - 89, LARGEST_BYTE = 250;           // the same to 2^(E - 8)

__device__ __forceinline__ float infinity() { return __uint_as_float(formats::EXPONENT); }
__device__ __forceinline__ float shift_of(float top) { return __fsub_rn(MAGIC + 8.0f, top == infinity() ? IDLE_TOP : top); }
__device__ __forceinline__ float reach_of(float top) { return fabsf(top) < IDLE_TOP ? fabsf(top) : IDLE_TOP; }
__device__ __forceinline__ bool is_usual_top(float top) { return fabsf(top) < IDLE_TOP || top == infinity(); }
__device__ __forceinline__ bool is_usual_delta(float x) { return x == 0.0f || (fabsf(x) >= 0x1p-90f && fabsf(x) <= 0x1p90f); }
__device__ __forceinline__ bool is_usual_exponent(float e) { return e >= -30.0f && e <= 8.0f; }

// What all tiles of a call share.
struct Constants {
  float c;
  float largest_score;
  float score_factor;
  float softmax_scale;
  bool usual;
};

// What belongs to a thread's row; as `Columns`.
struct Row {
  float top = 0.0f, shift = 0.0f, delta = 0.0f;  // owner of queries
  float reach = 0.0f;                            // |m|, likewise
  float power = 0.0f, exponent = 0.0f;  // 2^eK and eK, or 2^eQ and eQ
  float factor = 0.0f;                  // softmax_scale times that power
  uint32_t unusual = 1;                 // whether it is outside Note [Fast tiles]; of one row, then of all of a warp
};

// Which columns of a block a row sees: from `bound` on if it is a key, up to `bound` if it is a query.
__device__ __forceinline__ bool sees(int column, int bound) { return KEYS ? column >= bound : column <= bound; }

struct Pair {
  uint64_t low, high;
};
__device__ __forceinline__ Pair load_pairs(const float* columns) {
  const float4 x = *reinterpret_cast<const float4*>(columns);
  return {ptx::pack_f32x2(x.x, x.y), ptx::pack_f32x2(x.z, x.w)};
}
__device__ __forceinline__ uint64_t twice(float x) { return ptx::pack_f32x2(x, x); }

// ---- P ---------------------------------------------------------------------------------------------------------

// Scores of a row, two to a number, as floor and fraction: t = floor(c S) + 8 - m + MAGIC, f = c S - floor(c S).
struct Split {
  uint64_t t[BLOCK / 2];
  uint64_t f[BLOCK / 2];
};

__device__ constexpr bool is_hardware(int pair) { return pair % 16 < HARDWARE_PAIRS_OF_16; }

// The largest of t over what is visible, 0 if nothing is, as bits; and the largest |S|, NaN if one is. With KEYS, t and
// f too, both of the integer below c S: Note [Fast tiles].
template <bool MASKED>
__device__ __forceinline__ uint32_t scan_scores(Split& split, const float (&s)[BLOCK], const Columns& columns, int first,
                                                const Row& row, int bound, float c, float& magnitude) {
  float largest = KEYS ? 0.0f : minus_infinity();
  magnitude = 0.0f;
#pragma unroll
  for (int i = 0; i < BLOCK; i += 4) {
    float x[4] = {s[i], s[i + 1], s[i + 2], s[i + 3]};
    magnitude = ptx::max_nan_abs_f32(magnitude, x[0], x[1]);
    magnitude = ptx::max_nan_abs_f32(magnitude, x[2], x[3]);
    if constexpr (KEYS) {
      const Pair below = load_pairs(columns.below + first + i), k = load_pairs(columns.shift + first + i);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const int pair = (i + j) / 2;
        const uint64_t xx = ptx::pack_f32x2(x[j], x[j + 1]);
        const uint64_t t = ptx::fma_rp_f32x2(xx, twice(c), j == 0 ? below.low : below.high);
        split.t[pair] = t;
        split.f[pair] = is_hardware(pair) ? xx : ptx::fma_rn_f32x2(xx, twice(c), ptx::sub_rn_f32x2(j == 0 ? k.low : k.high, t));
        const float2 y = ptx::unpack_f32x2(t);
        x[j] = y.x;
        x[j + 1] = y.y;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!MASKED || sees(i + j, bound)) largest = fmaxf(largest, x[j]);
    }
  }
  if constexpr (KEYS) return __float_as_uint(largest);
  return largest == minus_infinity() ? 0 : __float_as_uint(__fmaf_ru(largest, c, row.shift));
}

// 2^e for an integer, -126..127.
__device__ __forceinline__ float exp2_of(int e) { return __uint_as_float(uint32_t(127 + e) << 23); }

// Codes of P under 2^(E - 8). RAISED: exponents might wrap.
template <bool MASKED, bool RAISED>
__device__ __forceinline__ void round_scores(uint32_t (&codes)[BLOCK_WORDS], const Split& split, const float (&s)[BLOCK],
                                             const float* shifts, const Row& row, int bound, float c, int e) {
  const float scale = exp2_of(-e), low = __fadd_rn(MAGIC - 24.0f, float(e));
  const uint64_t c2 = twice(__fmul_rn(0x1.5cp-2f, scale)), c1 = twice(__fmul_rn(0x1.52p-1f, scale));
  const uint64_t c0 = twice(scale), cc = twice(c);
#pragma unroll
  for (int i = 0; i < BLOCK; i += 4) {
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const int pair = (i + j) / 2;
      const uint64_t x = ptx::pack_f32x2(s[i + j], s[i + j + 1]);
      if (is_hardware(pair)) {
        const uint64_t k = KEYS ? ptx::pack_f32x2(shifts[i + j], shifts[i + j + 1]) : twice(row.shift);
        const float2 z = ptx::unpack_f32x2(ptx::fma_rn_f32x2(x, cc, ptx::sub_rn_f32x2(k, twice(__fadd_rn(MAGIC, float(e))))));
        y[j] = ptx::ex2_approx_f32(z.x);
        y[j + 1] = ptx::ex2_approx_f32(z.y);
        continue;
      }
      uint64_t t, f;
      if constexpr (KEYS) {
        t = split.t[pair];
        f = split.f[pair];
      } else {
        t = ptx::fma_rm_f32x2(x, cc, twice(row.shift));
        f = ptx::fma_rn_f32x2(x, cc, ptx::sub_rn_f32x2(twice(row.shift), t));
      }
      const uint64_t p = ptx::fma_rn_f32x2(ptx::fma_rn_f32x2(c2, f, c1), f, c0);
      const float2 mantissa = ptx::unpack_f32x2(p);
      float2 exponent = ptx::unpack_f32x2(t);
      if constexpr (RAISED) exponent = make_float2(fmaxf(exponent.x, low), fmaxf(exponent.y, low));
      y[j] = __uint_as_float(__float_as_uint(mantissa.x) + (__float_as_uint(exponent.x) << 23));
      y[j + 1] = __uint_as_float(__float_as_uint(mantissa.y) + (__float_as_uint(exponent.y) << 23));
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (MASKED && !sees(i + j, bound)) y[j] = 0.0f;
    }
    codes[i / 4] = ptx::cvt_rn_satfinite_e4m3x2_f32_twice(y[0], y[1], y[2], y[3]);
  }
}

// Order of float32 as that of unsigned integers; all but NaN are above 0.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & formats::SIGN ? ~bits : bits | formats::SIGN;
}
__device__ __forceinline__ float unordered(uint32_t key) {
  return __uint_as_float(key & formats::SIGN ? key ^ formats::SIGN : ~key);
}

// Move every element one place down, the first to the end. Loops that are seldom run take their elements from place 0
// and rotate, so that they stay loops over registers: unrolled they would be most of the kernel's code.
template <class T, int N>
__device__ __forceinline__ void rotate(T (&x)[N]) {
  const T first = x[0];
#pragma unroll
  for (int i = 1; i < N; ++i) x[i - 1] = x[i];
  x[N - 1] = first;
}

// P of any tile; returns its scale byte.
__device__ __forceinline__ uint32_t probabilities_slow(uint32_t (&codes)[BLOCK_WORDS], float (&s)[BLOCK], const Columns& columns,
                                                       int first, const Row& row, int bound, const Constants& g) {
  uint32_t key = 0;
#pragma unroll 1
  for (int i = 0; i < BLOCK; ++i, rotate(s)) {
    const float top = KEYS ? columns.top[first + i] : row.top;
    if (g.score_factor != 1.0f) s[0] = __fmul_rn(s[0], g.score_factor);
    if (s[0] == minus_infinity()) s[0] = -0x1.fffffep127f;  // an overflowed score counts as the lowest number
    const float relative = __fsub_rn(ceil_any(s[0], g.c), top);
    if (sees(i, bound) && top != infinity() && relative == relative) key = max(key, ordered(relative));
  }
  key = ptx::redux_max_u32(key);
  float e = key == 0 ? 0.0f : unordered(key);
  if (!(fabsf(e) < infinity())) e = 0.0f;
  const float scale = __fsub_rn(e, 8.0f);
#pragma unroll
  for (int i = 0; i < BLOCK_WORDS; ++i) codes[i] = 0;
#pragma unroll 1
  for (int i = 0; i < BLOCK; ++i, rotate(s)) {
    const float top = KEYS ? columns.top[first + i] : row.top;
    uint32_t code = round_any(s[0], g.c, __fadd_rn(e, top));
    if (scale < -127.0f && code != P_NAN) code = 0;
    codes[0] |= (sees(i, bound) && top != infinity() ? code : 0) << 8 * (i % 4);
    if (i % 4 == 3) rotate(codes);
  }
  return scale_byte(scale);
}

// P of a tile from its scores, and the scale byte 127 + E - 8; whether Note [Fast tiles] holds for it. Rows and columns
// are usual; `reach`: their largest |m|.
template <bool MASKED>
__device__ __forceinline__ bool probabilities_fast(uint32_t (&codes)[BLOCK_WORDS], uint32_t& byte, const float (&s)[BLOCK],
                                                   const Columns& columns, int first, const Row& row, int bound,
                                                   const Constants& g, float reach) {
  Split split;
  float own;
  const uint32_t key = ptx::redux_max_u32(scan_scores<MASKED>(split, s, columns, first, row, bound, g.c, own));
  // NaN has the largest bits, so that it reaches every lane.
  const float magnitude = __uint_as_float(ptx::redux_max_u32(__float_as_uint(own)));
  int e = int(key) - int(__float_as_uint(MAGIC) + (KEYS ? 7 : 8));
  if (!MASKED && __fmaf_ru(magnitude, g.c, reach) <= REACH && uint32_t(e - LOWEST_E) <= HIGHEST_E - LOWEST_E) {
    round_scores<MASKED, MASKED>(codes, split, s, columns.shift + first, row, bound, g.c, e);
  } else {
    if (e < -int(IDLE_TOP) / 2) e = 0;  // nothing is visible and active
    if (!(magnitude <= g.largest_score && e >= LOWEST_E && e <= HIGHEST_E)) return false;
    round_scores<MASKED, true>(codes, split, s, columns.shift + first, row, bound, g.c, e);
  }
  byte = uint32_t(e + 119);
  return true;
}

// ---- X ---------------------------------------------------------------------------------------------------------

// Of X as the reference computes it: the largest finite magnitude, and codes; returns the scale byte.
__device__ __forceinline__ uint32_t gradients_slow(uint32_t (&codes)[BLOCK_WORDS], float (&x)[BLOCK],
                                                   const uint32_t (&p)[BLOCK_WORDS], uint32_t p_byte, const Columns& columns,
                                                   int first, const Row& row, int bound, const Constants& g) {
  const float p_scale = formats::decode_e8m0(p_byte);
  uint32_t amax = 0, words[BLOCK_WORDS];
#pragma unroll
  for (int i = 0; i < BLOCK_WORDS; ++i) words[i] = p[i];
#pragma unroll 1
  for (int i = 0; i < BLOCK; ++i, rotate(x)) {
    const float top = KEYS ? columns.top[first + i] : row.top, delta = KEYS ? columns.delta[first + i] : row.delta;
    const float of_query = KEYS ? columns.power[first + i] : row.power;
    const float of_key = KEYS ? row.power : columns.power[first + i];
    const uint32_t code = words[0] & 0xFF;
    words[0] >>= 8;
    if (i % 4 == 3) rotate(words);
    const float value = code == P_NAN ? not_a_number() : __fmul_rn(formats::decode_e4m3(code), p_scale);
    float y = __fmul_rn(__fmul_rn(__fsub_rn(x[0], delta), value), g.softmax_scale);
    y = __fmul_rn(__fmul_rn(y, of_query), of_key);
    x[0] = sees(i, bound) && top != infinity() ? y : 0.0f;
    const uint32_t magnitude = __float_as_uint(x[0]) & formats::MAGNITUDE;
    amax = max(amax, magnitude < formats::EXPONENT ? magnitude : 0);
  }
  amax = ptx::redux_max_u32(amax);
  const uint32_t byte = formats::rceil_e4m3(__uint_as_float(amax));
  const float inverse = formats::inverse_e8m0(byte);
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) x[i] = fabsf(x[i]) < infinity() ? __fmul_rn(x[i], inverse) : not_a_number();
#pragma unroll
  for (int i = 0; i < BLOCK; i += 4) codes[i / 4] = ptx::cvt_rn_satfinite_e4m3x2_f32_twice(x[i], x[i + 1], x[i + 2], x[i + 3]);
  return byte;
}

// v of Note [Fast tiles]; returns the largest |v|, NaN if one is.
__device__ __forceinline__ float scan_gradients(uint64_t (&v)[BLOCK / 2], const float (&dp)[BLOCK],
                                                const uint32_t (&p)[BLOCK_WORDS], const Columns& columns, int first,
                                                const Row& row) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < BLOCK; i += 4) {
    const Pair power = load_pairs(columns.power + first + i);
    Pair minus = {};
    if constexpr (KEYS) minus = load_pairs(columns.minus + first + i);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const float2 code = formats::decode_e4m3x2(p[i / 4] >> 8 * j);
      const uint64_t c = ptx::pack_f32x2(code.x, code.y), of_column = j == 0 ? power.low : power.high;
      uint64_t x = ptx::pack_f32x2(dp[i + j], dp[i + j + 1]);
      if constexpr (KEYS) {
        x = ptx::mul_rn_f32x2(ptx::fma_rn_f32x2(x, of_column, j == 0 ? minus.low : minus.high), c);
      } else {
        x = ptx::mul_rn_f32x2(ptx::mul_rn_f32x2(ptx::sub_rn_f32x2(x, twice(row.delta)), c), of_column);
      }
      v[(i + j) / 2] = x;
      const float2 y = ptx::unpack_f32x2(x);
      largest = ptx::max_nan_abs_f32(largest, y.x, y.y);
    }
  }
  return largest;
}

// X of a tile, and its scale byte; whether Note [Fast tiles] holds for it. Rows and columns are usual.
__device__ __forceinline__ bool gradients_fast(uint32_t (&codes)[BLOCK_WORDS], uint32_t& byte, const float (&dp)[BLOCK],
                                               const uint32_t (&p)[BLOCK_WORDS], uint32_t p_byte, const Columns& columns,
                                               int first, const Row& row) {
  uint64_t v[BLOCK / 2];
  const float own = __fmul_rn(fabsf(scan_gradients(v, dp, p, columns, first, row)), row.factor);
  // NaN has the largest bits, so that it reaches every lane.
  const uint32_t amax = ptx::redux_max_u32(__float_as_uint(own));
  uint32_t relative = formats::rceil_e4m3(__uint_as_float(amax));  // to 2^(E - 8)
  byte = relative + p_byte - 127;
  const bool fits = relative - SMALLEST_BYTE <= LARGEST_BYTE - SMALLEST_BYTE && byte - SMALLEST_X_BYTE <= LARGEST_X_BYTE - SMALLEST_X_BYTE;
  if (!fits) {
    if (amax != 0) return false;
    byte = 0;
    relative = 127;  // 0 times a finite number
  }
  const uint64_t factor = twice(__fmul_rn(row.factor, formats::inverse_e8m0(relative)));
#pragma unroll
  for (int i = 0; i < BLOCK_WORDS; ++i) {
    const float2 low = ptx::unpack_f32x2(ptx::mul_rn_f32x2(v[2 * i], factor));
    const float2 high = ptx::unpack_f32x2(ptx::mul_rn_f32x2(v[2 * i + 1], factor));
    codes[i] = ptx::cvt_rn_satfinite_e4m3x2_f32_twice(low.x, low.y, high.x, high.y);
  }
  return true;
}

}  // namespace blackwell::backward
