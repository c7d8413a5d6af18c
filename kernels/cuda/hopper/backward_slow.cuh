// Slow steps of Note [Fast steps]: steps 1, 3 and 4 of Note [Backward] of flamia.reference.backward in the operations
// of the reference, one element after another. A thread keeps its elements in its own part of `scratch`, so that the
// loop stays a loop.
#pragma once

#include "hopper/backward.cuh"

namespace backward {

// The tiles that meet in a step.
struct Meeting {
  int64_t q_slot;
  int64_t k_slot;
  Hidden hidden;
};

// S as the reference has it, from the accumulator.
__device__ __forceinline__ float slow_score(const BackwardParams& p, const Meeting& m, Place at, float acc) {
  const float of_key = token_scale(p.k_exponents[m.k_slot * TILE + at.key]);
  const float of_query = token_scale(p.q_exponents[m.q_slot * TILE + at.query]);
  return __fmul_rn(__fmul_rn(acc, of_key), of_query);
}

// P of a score, given m: Note [Own exponents].
__device__ __forceinline__ float slow_probability(float s, float c, float top) {
  constexpr float LARGEST = 0x1.fffffep127f;
  if (s < -LARGEST) s = -LARGEST;
  const bool small = fabsf(__fmul_rz(s, c)) < 0x1p23f;
  const float r = small ? floorf(__fmul_rd(s, c)) : fminf(fmaxf(__fmul_rn(s, c), -LARGEST), LARGEST);
  const float f = small ? __fmaf_rn(c, s, -r) : 0.0f;
  const float field = __fadd_rn(__fsub_rn(r, top), 127.0f);
  if (!(s <= LARGEST) || field != field) return __uint_as_float(0x7FC00000u);
  if (field < 0.0f) return 0.0f;
  const float k = __fmaf_rn(__fmaf_rn(0x1.5cp-2f, f, 0x1.52p-1f), f, 1.5f * (1 << (23 - F)));
  const uint32_t n = uint32_t(int(field) << F) + (__float_as_uint(k) & (2u << F) - 1);
  return __uint_as_float(n << (23 - F));
}

// fl(P fl(dP - delta)), from the accumulator of dP.
__device__ __forceinline__ float slow_gradient(const BackwardParams& p, const Meeting& m, Place at, float acc,
                                               float probability) {
  const uint8_t* const dout_scales = p.dout_scales + m.q_slot * layout::SCALE_TILE_BYTES;
  const float of_value = token_scale(p.v_exponents[m.k_slot * TILE + at.key]);
  const float of_dout = E4M3 ? decode_scale(dout_scales[layout::scale_offset(at.query, 0)]) : 1.0f;
  const float dp = __fmul_rn(__fmul_rn(acc, of_value), of_dout);
  return __fmul_rn(__fsub_rn(dp, p.delta[m.q_slot * TILE + at.query]), probability);
}

// X to F fraction bits, ties away from zero for F = 3; F = 7 is left to the conversion to bfloat16.
__device__ __forceinline__ float slow_round(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & formats::MAGNITUDE) >= formats::EXPONENT) return __uint_as_float(0x7FC00000u);
  if constexpr (!E4M3) return x;
  return __uint_as_float(bits + (1u << (22 - F)) & ~((1u << (23 - F)) - 1));
}

// From accumulators of S and dP to P and X, packed. `place` gives the place of an element.
template <class PlaceOf>
__device__ __forceinline__ void slow_step(uint32_t (&a)[16], uint32_t (&b)[16], const float (&s)[32], const float (&dp)[32],
                                          const BackwardParams& p, const Meeting& m, PlaceOf place) {
  float* const own = p.scratch + int64_t(blockIdx.x) * (64 * CONSUMERS) + ptx::thread_index();
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    own[i * CONSUMERS] = s[i];
    own[(32 + i) * CONSUMERS] = dp[i];
  }
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const Place at = place(i);
    const float top = p.top[m.q_slot * TILE + at.query];
    float probability = 0.0f, x = 0.0f;
    if (!(m.hidden(at.query, at.key) || top == infinity())) {
      probability = slow_probability(slow_score(p, m, at, own[i * CONSUMERS]), p.c, top);
      x = slow_round(slow_gradient(p, m, at, own[(32 + i) * CONSUMERS], probability));
    }
    own[i * CONSUMERS] = probability;
    own[(32 + i) * CONSUMERS] = x;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    a[i] = ptx::cvt_rn_bf16x2_f32(own[(2 * i + 1) * CONSUMERS], own[2 * i * CONSUMERS]);
    b[i] = ptx::cvt_rn_bf16x2_f32(own[(33 + 2 * i) * CONSUMERS], own[(32 + 2 * i) * CONSUMERS]);
  }
}

}  // namespace backward
