// Slow tiles of Note [Fast tiles]: steps 1, 3 and 4 of Note [Backward] of flamia.reference.backward in the operations
// of the reference, one element after another. A thread keeps its elements in its own part of `scratch`, so that the
// loops stay loops.
#pragma once

#include "hopper/backward.cuh"

namespace backward {

// The tiles that meet in a step.
struct Meeting {
  int64_t q_slot;
  int64_t k_slot;
  Hidden hidden;
};

__device__ __forceinline__ float* scratch_of(const BackwardParams& p) {
  return p.scratch + int64_t(blockIdx.x) * (64 * CONSUMERS) + ptx::thread_index();
}

// Order of float32 as that of unsigned integers; all but NaN are above 0.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & formats::SIGN ? ~bits : bits | formats::SIGN;
}
__device__ __forceinline__ float unordered(uint32_t key) {
  return __uint_as_float(key & formats::SIGN ? key ^ formats::SIGN : ~key);
}

// S as the reference has it, from the accumulator.
__device__ __forceinline__ float slow_score(const BackwardParams& p, const Meeting& m, Place at, float acc) {
  const float of_key = exp2_scale(p.k_exponents[m.k_slot * TILE + at.key]);
  const float of_query = exp2_scale(p.q_exponents[m.q_slot * TILE + at.query]);
  return __fmul_rn(__fmul_rn(acc, of_key), of_query);
}

// ceil(c S) of Note [Probabilities].
__device__ __forceinline__ float slow_ceiling(float s, float c) {
  return fabsf(__fmul_rz(s, c)) < 0x1p23f ? ceilf(__fmul_ru(s, c)) : __fmul_rn(s, c);
}

// p 2^(r - above + 8), rounded to E4M3.
__device__ __forceinline__ float slow_code(float s, float c, float above) {
  if (s < -0x1.fffffep127f) s = -0x1.fffffep127f;
  const bool small = fabsf(__fmul_rz(s, c)) < 0x1p23f;
  const float r = small ? floorf(__fmul_rd(s, c)) : __fmul_rn(s, c);
  const float f = small ? __fmaf_rn(c, s, -r) : __fsub_rn(r, r);
  float exponent = __fadd_rn(__fsub_rn(r, above), 8.0f);
  if (exponent < -126.0f) exponent = -126.0f;
  const float p = exp2_mantissa(f);
  if (exponent != exponent || p != p) return __uint_as_float(0x7FC00000u);
  // Above 0 only where E + m was rounded; E is so low then that the tile contributes nothing.
  const float y = __uint_as_float(__float_as_uint(p) + (uint32_t(int(fminf(exponent, 127.0f))) << 23));
  return formats::decode_e4m3(ptx::cvt_rn_satfinite_e4m3x2_f32(0.0f, y));
}

// From accumulators of S to P, decoded. `place` gives the place of an element.
template <class PlaceOf>
__device__ __forceinline__ void slow_probabilities(float (&s)[32], const BackwardParams& p, const Meeting& m,
                                                   Exchange& exchange, PlaceOf place) {
  float* const own = scratch_of(p);
#pragma unroll
  for (int i = 0; i < 32; ++i) own[i * CONSUMERS] = s[i];
  uint32_t largest[2] = {0, 0};
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const Place at = place(i);
    const float top = p.top[m.q_slot * TILE + at.query];
    if (m.hidden(at.query, at.key) || top == infinity()) continue;
    const float relative = __fsub_rn(slow_ceiling(slow_score(p, m, at, own[i * CONSUMERS]), p.c), top);
    if (relative == relative) {
      if (i < 16) largest[0] = max(largest[0], ordered(relative));
      else largest[1] = max(largest[1], ordered(relative));
    }
  }
  const uint4 both = exchange.largest(largest[0], largest[1], 0);
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const uint32_t key = i < 16 ? both.x : both.y;
    float e = key == 0 ? 0.0f : unordered(key);
    if (!(fabsf(e) <= 0x1.fffffep127f)) e = 0.0f;
    const Place at = place(i);
    const float top = p.top[m.q_slot * TILE + at.query];
    float x = 0.0f;
    if (!(m.hidden(at.query, at.key) || top == infinity())) {
      const float code = slow_code(slow_score(p, m, at, own[i * CONSUMERS]), p.c, __fadd_rn(e, top));
      const float scale = fminf(fmaxf(e - 8.0f, -127.0f), 127.0f);
      x = e - 8.0f < -127.0f && code == code ? 0.0f : __fmul_rn(code, exp2_scale(scale));
    }
    own[i * CONSUMERS] = x;
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = own[i * CONSUMERS];
}

// Leave P, packed, where slow_probabilities would.
__device__ __forceinline__ void keep_probabilities(const uint32_t (&a)[16], const BackwardParams& p) {
  float* const own = scratch_of(p);
#pragma unroll
  for (int i = 0; i < 32; ++i) own[i * CONSUMERS] = unpack(a, i);
}

// From P, where slow_probabilities left it, and the accumulators of dP to X, quantized and decoded, in the place of dP.
template <class PlaceOf>
__device__ __forceinline__ void slow_gradients(float (&dp)[32], const BackwardParams& p, const Meeting& m,
                                               Exchange& exchange, PlaceOf place) {
  float* const own = scratch_of(p);
#pragma unroll
  for (int i = 0; i < 32; ++i) own[(32 + i) * CONSUMERS] = dp[i];
  uint32_t largest[2] = {0, 0};
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const Place at = place(i);
    const int64_t query = m.q_slot * TILE + at.query, key = m.k_slot * TILE + at.key;
    float x = 0.0f;
    if (!(m.hidden(at.query, at.key) || p.top[query] == infinity())) {
      const uint8_t* const v_scales = (m.hidden.diagonal ? p.v1_scales : p.v_scales) + m.k_slot * layout::SCALE_TILE_BYTES;
      const float of_value = decode_scale(v_scales[layout::scale_offset(at.key, 0)]);
      const float of_dout =
          decode_scale(p.dout_scales[m.q_slot * layout::SCALE_TILE_BYTES + layout::scale_offset(at.query, 0)]);
      x = __fmul_rn(__fmul_rn(own[(32 + i) * CONSUMERS], of_value), of_dout);
      x = __fmul_rn(__fsub_rn(x, p.delta[query]), own[i * CONSUMERS]);
      x = __fmul_rn(x, p.softmax_scale);
      x = __fmul_rn(__fmul_rn(x, exp2_scale(p.q_exponents[query])), exp2_scale(p.k_exponents[key]));
    }
    own[i * CONSUMERS] = x;
    const uint32_t magnitude = __float_as_uint(x) & formats::MAGNITUDE;
    if (magnitude < formats::EXPONENT) {
      if (i < 16) largest[0] = max(largest[0], magnitude);
      else largest[1] = max(largest[1], magnitude);
    }
  }
  const uint4 both = exchange.largest(largest[0], largest[1], 1);
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const uint32_t byte = formats::rceil_e4m3(__uint_as_float(i < 16 ? both.x : both.y));
    const float x = own[i * CONSUMERS], inverse = byte == 254 ? 0x1p-127f : formats::inverse_e8m0(byte);
    const bool finite = (__float_as_uint(x) & formats::MAGNITUDE) < formats::EXPONENT;
    const float code = formats::decode_e4m3(ptx::cvt_rn_satfinite_e4m3x2_f32(0.0f, __fmul_rn(x, inverse)));
    own[i * CONSUMERS] = finite ? __fmul_rn(code, formats::decode_e8m0(byte)) : __uint_as_float(0x7FC00000u);
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) dp[i] = own[i * CONSUMERS];
}

}  // namespace backward
