// Steps 1, 3 and 4 of Note [Backward] of flamia.reference.backward for one 32x32 tile: a warp holds it, a thread one
// row.
//
// Note [Fast tiles]
// ~~~~~~~~~~~~~~~~~
// With the integer m of a query and k = MAGIC + 8 - m, the FP32 numbers around c S + k are the integers while |c S| and
// |m| are at most 2^20. So fma(S, c, k) rounded up is ceil(c S) - m + 8 + MAGIC: its largest gives E; rounded down it
// is t = floor(c S) + k, the exponent of P in its low bits, and fma(S, c, k - t) is the fraction, rounded once (Note
// [Floor by a magic addend] of exp2.cuh). 2^-E is in the coefficients of the cubic. An inactive query has m = 2^20: its
// P is 0, and it never gives the maximum. t is raised to MAGIC + E - 24, where P rounds to 0, so that no exponent
// wraps; where c |S| and |m| together are at most 100 (`REACH`), none does.
//
// Powers of two commute with rounding as long as nothing leaves the normal numbers, so that X is
//   fl(v (softmax_scale 2^(E - 8 + eK - e))), v = fl(P' fma(dP, 2^eQ, -delta 2^eQ))
// with P' the codes of P and 2^e the tile's scale; as rounding is monotone, the largest |v| gives the largest |X|. (The
// owner of queries has 2^eK on its columns instead: v = fl(P' fl(dP - delta)) 2^eK.) An entry that is not rounded to 0
// has at least 2^-19 of the tile's largest X, so the tile's largest tells whether all that counts was normal: from
// 2^-70 to 2^40 it was, with exponents from -30 to 8, softmax_scale from 2^-10 to 2^10, and delta 0 or from 2^-90 to
// 2^90.
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
constexpr float LOWEST_E = -100.0f;
constexpr float REACH = 100.0f;
constexpr float SMALLEST_X = 0x1p-70f, LARGEST_X = 0x1p40f;

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
  bool usual = false;
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

// The largest of ceil(c S) - m + 8 + MAGIC over what is visible, 0 if nothing is; and the largest |S|, NaN if one is.
template <bool MASKED>
__device__ __forceinline__ float scan_scores(const float (&s)[BLOCK], const float* shifts, const Row& row, int bound, float c,
                                             float& magnitude) {
  float largest = KEYS ? 0.0f : minus_infinity();
  magnitude = 0.0f;
#pragma unroll
  for (int i = 0; i < BLOCK; i += 4) {
    float x[4] = {s[i], s[i + 1], s[i + 2], s[i + 3]};
    magnitude = ptx::max_nan_abs_f32(magnitude, x[0], x[1]);
    magnitude = ptx::max_nan_abs_f32(magnitude, x[2], x[3]);
    if constexpr (KEYS) {
      const Pair k = load_pairs(shifts + i);
      const float2 low = ptx::unpack_f32x2(ptx::fma_rp_f32x2(ptx::pack_f32x2(x[0], x[1]), twice(c), k.low));
      const float2 high = ptx::unpack_f32x2(ptx::fma_rp_f32x2(ptx::pack_f32x2(x[2], x[3]), twice(c), k.high));
      x[0] = low.x;
      x[1] = low.y;
      x[2] = high.x;
      x[3] = high.y;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!MASKED || sees(i + j, bound)) largest = fmaxf(largest, x[j]);
    }
  }
  if constexpr (KEYS) return largest;
  return largest == minus_infinity() ? 0.0f : __fmaf_ru(largest, c, row.shift);
}

// Codes of P under 2^(E - 8). RAISED: exponents might wrap.
template <bool MASKED, bool RAISED>
__device__ __forceinline__ void round_scores(uint32_t (&codes)[BLOCK_WORDS], const float (&s)[BLOCK], const float* shifts,
                                             const Row& row, int bound, float c, float e) {
  const float scale = exp2_integer(-e), low = __fadd_rn(MAGIC - 24.0f, e);
  const uint64_t c3 = twice(__fmul_rn(0x1.4p-4f, scale)), c2 = twice(__fmul_rn(0x1.dp-3f, scale));
  const uint64_t c1 = twice(__fmul_rn(0x1.64p-1f, scale)), c0 = twice(scale), cc = twice(c);
#pragma unroll
  for (int i = 0; i < BLOCK; i += 4) {
    Pair k = {twice(row.shift), twice(row.shift)};
    if constexpr (KEYS) k = load_pairs(shifts + i);
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const uint64_t x = ptx::pack_f32x2(s[i + j], s[i + j + 1]), kk = j == 0 ? k.low : k.high;
      if ((i + j) / 2 % 16 < HARDWARE_PAIRS_OF_16) {
        const float2 z = ptx::unpack_f32x2(ptx::fma_rn_f32x2(x, cc, ptx::sub_rn_f32x2(kk, twice(__fadd_rn(MAGIC, e)))));
        y[j] = ptx::ex2_approx_f32(z.x);
        y[j + 1] = ptx::ex2_approx_f32(z.y);
        continue;
      }
      const uint64_t t = ptx::fma_rm_f32x2(x, cc, kk);
      const uint64_t f = ptx::fma_rn_f32x2(x, cc, ptx::sub_rn_f32x2(kk, t));
      const uint64_t p = ptx::fma_rn_f32x2(ptx::fma_rn_f32x2(ptx::fma_rn_f32x2(c3, f, c2), f, c1), f, c0);
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
    codes[i / 4] = formats::encode_e4m3x4(y[0], y[1], y[2], y[3]);
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

// P of any tile; returns its scale byte.
__device__ __forceinline__ uint32_t probabilities_slow(uint32_t (&codes)[BLOCK_WORDS], float (&s)[BLOCK], const Columns& columns,
                                                       int first, const Row& row, int bound, const Constants& g) {
  uint32_t key = 0;
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    const float top = KEYS ? columns.top[first + i] : row.top;
    if (g.score_factor != 1.0f) s[i] = __fmul_rn(s[i], g.score_factor);
    if (s[i] == minus_infinity()) s[i] = -0x1.fffffep127f;  // an overflowed score counts as the lowest number
    const float relative = __fsub_rn(ceil_any(s[i], g.c), top);
    if (sees(i, bound) && top != infinity() && relative == relative) key = max(key, ordered(relative));
  }
  key = ptx::redux_max_u32(key);
  float e = key == 0 ? 0.0f : unordered(key);
  if (!(fabsf(e) < infinity())) e = 0.0f;
  const float scale = __fsub_rn(e, 8.0f);
#pragma unroll
  for (int i = 0; i < BLOCK; i += 4) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float top = KEYS ? columns.top[first + i + j] : row.top;
      uint32_t code = round_any(s[i + j], g.c, __fadd_rn(e, top));
      if (scale < -127.0f && code != P_NAN) code = 0;
      word |= (sees(i + j, bound) && top != infinity() ? code : 0) << 8 * j;
    }
    codes[i / 4] = word;
  }
  return scale_byte(scale);
}

// P of a tile from its scores; returns the scale byte 127 + E - 8. `unusual`: of the columns; `reach`: their largest
// |m|.
template <bool MASKED>
__device__ __forceinline__ uint32_t probabilities(uint32_t (&codes)[BLOCK_WORDS], float (&s)[BLOCK], const Columns& columns,
                                                  int first, const Row& row, int bound, const Constants& g, bool unusual,
                                                  float reach) {
  float magnitude;
  const float largest = scan_scores<MASKED>(s, columns.shift + first, row, bound, g.c, magnitude);
  const uint32_t key = ptx::redux_max_u32(__float_as_uint(largest));
  float e = __fsub_rn(__uint_as_float(key), MAGIC + 8.0f);
  if (key == 0 || e < -IDLE_TOP / 2.0f) e = 0.0f;  // nothing is visible and active
  const bool fast = !unusual && row.usual && magnitude <= g.largest_score && e >= LOWEST_E;
  if (ptx::vote_any(!fast)) return probabilities_slow(codes, s, columns, first, row, bound, g);
  const bool near = !MASKED && __fmaf_ru(magnitude, g.c, KEYS ? reach : row.reach) <= REACH;
  if (!MASKED && !ptx::vote_any(!near)) {
    round_scores<MASKED, MASKED>(codes, s, columns.shift + first, row, bound, g.c, e);
  } else {
    round_scores<MASKED, true>(codes, s, columns.shift + first, row, bound, g.c, e);
  }
  return uint32_t(int(e) + 119);
}

// ---- X ---------------------------------------------------------------------------------------------------------

// Of X as the reference computes it: the largest finite magnitude, and codes; returns the scale byte.
__device__ __forceinline__ uint32_t gradients_slow(uint32_t (&codes)[BLOCK_WORDS], float (&x)[BLOCK],
                                                   const uint32_t (&p)[BLOCK_WORDS], uint32_t p_byte, const Columns& columns,
                                                   int first, const Row& row, int bound, const Constants& g) {
  const float p_scale = formats::decode_e8m0(p_byte);
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) {
    const float top = KEYS ? columns.top[first + i] : row.top, delta = KEYS ? columns.delta[first + i] : row.delta;
    const float of_query = KEYS ? columns.power[first + i] : row.power;
    const float of_key = KEYS ? row.power : columns.power[first + i];
    const uint32_t code = p[i / 4] >> 8 * (i % 4) & 0xFF;
    const float value = code == P_NAN ? not_a_number() : __fmul_rn(formats::decode_e4m3(code), p_scale);
    float y = __fmul_rn(__fmul_rn(__fsub_rn(x[i], delta), value), g.softmax_scale);
    y = __fmul_rn(__fmul_rn(y, of_query), of_key);
    x[i] = sees(i, bound) && top != infinity() ? y : 0.0f;
    const uint32_t magnitude = __float_as_uint(x[i]) & formats::MAGNITUDE;
    amax = max(amax, magnitude < formats::EXPONENT ? magnitude : 0);
  }
  amax = ptx::redux_max_u32(amax);
  const uint32_t byte = formats::rceil_e4m3(__uint_as_float(amax));
  const float inverse = formats::inverse_e8m0(byte);
#pragma unroll
  for (int i = 0; i < BLOCK; ++i) x[i] = fabsf(x[i]) < infinity() ? __fmul_rn(x[i], inverse) : not_a_number();
#pragma unroll
  for (int i = 0; i < BLOCK; i += 4) codes[i / 4] = formats::encode_e4m3x4(x[i], x[i + 1], x[i + 2], x[i + 3]);
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

// X of a tile; returns its scale byte.
__device__ __forceinline__ uint32_t gradients(uint32_t (&codes)[BLOCK_WORDS], float (&dp)[BLOCK],
                                              const uint32_t (&p)[BLOCK_WORDS], uint32_t p_byte, const Columns& columns,
                                              int first, const Row& row, int bound, const Constants& g, bool unusual) {
  uint64_t v[BLOCK / 2];
  const float largest = scan_gradients(v, dp, p, columns, first, row);
  const float exponent = __fadd_rn(float(int(p_byte) - 127), row.exponent);  // of what is not in v
  const bool fits = row.usual && exponent >= -126.0f && exponent <= 110.0f;
  const float own = __fmul_rn(__fmul_rn(fabsf(largest), g.softmax_scale), fits ? exp2_integer(exponent) : 0.0f);
  // NaN has the largest bits, so that it reaches every lane.
  const uint32_t amax = ptx::redux_max_u32(__float_as_uint(own));
  const uint32_t byte = formats::rceil_e4m3(__uint_as_float(amax));
  const float rest = __fsub_rn(exponent, float(int(byte) - 127));
  const bool small = amax < __float_as_uint(SMALLEST_X);
  const bool slow = unusual || !fits || amax > __float_as_uint(LARGEST_X) ||
                    (largest != 0.0f && (small || rest > 110.0f || rest < -110.0f));
  if (ptx::vote_any(slow)) return gradients_slow(codes, dp, p, p_byte, columns, first, row, bound, g);
  const uint64_t factor = twice(__fmul_rn(g.softmax_scale, exp2_integer(fmaxf(fminf(rest, 110.0f), -110.0f))));
#pragma unroll
  for (int i = 0; i < BLOCK_WORDS; ++i) {
    const float2 low = ptx::unpack_f32x2(ptx::mul_rn_f32x2(v[2 * i], factor));
    const float2 high = ptx::unpack_f32x2(ptx::mul_rn_f32x2(v[2 * i + 1], factor));
    codes[i] = formats::encode_e4m3x4(low.x, low.y, high.x, high.y);
  }
  return byte;
}

}  // namespace blackwell::backward
