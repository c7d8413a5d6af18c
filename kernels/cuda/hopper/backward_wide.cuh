// From E4M3 codes to wide tiles in shared memory.
#pragma once

#include "hopper/backward.cuh"

namespace backward {

// Two codes, at two bytes of the word, as bfloat16 numbers 2^120 times smaller; `which` takes each with its sign above it.
//
// Note [Shifted codes]
// ~~~~~~~~~~~~~~~~~~~~
// E4M3 and bfloat16 differ in the bias of the exponent, by 120, and in how many bits they have: a code whose magnitude is
// shifted by four bits is the number times 2^-120, subnormals included. NaN would be a finite number; here only the codes
// of lost tokens may be NaN, and zeros take their place. A power of two from 2^-120 to 2^7 may be held 2^120 times larger,
// and gives the number by one product.
__device__ __forceinline__ uint32_t shift_codes(uint32_t codes, uint32_t which) {
  return ptx::prmt(codes, 0, which) << 4 & 0x87F087F0u;
}
constexpr uint32_t FIRST_CODES = 0x9180, SECOND_CODES = 0xB3A2;

constexpr float LARGEST_POWER = 0x1p7f;
__device__ __forceinline__ bool widens_fast(float e) { return e >= -90.0f && e <= 7.0f; }  // false for a lost token

// The power of two for widen_piece, a pair of bfloat16 numbers, given 2^e or an integral e.
template <bool FAST>
__device__ __forceinline__ uint32_t pair_power(float power) {
  return ((__float_as_uint(power) >> 16) + (FAST ? 120 << 7 : 0)) * 0x00010001u;
}
template <bool FAST>
__device__ __forceinline__ uint32_t pair_exp2(float e) {
  if constexpr (FAST) {  // the low bits are those of (e + 247) 2^7
    const uint32_t bits = __float_as_uint(__fmaf_rn(e, 128.0f, MAGIC + 247 * 128.0f));
    return ptx::prmt(bits, 0, 0x1010);
  }
  return e == e ? pair_power<false>(exp2_scale(e)) : 0;
}

// Eight codes times a power of two: FAST, from 2^-90 to 2^7; or any, saturated, and 0 gives 0.
template <bool FAST>
__device__ __forceinline__ uint4 widen_piece(uint32_t x, uint32_t y, uint32_t power) {
  constexpr uint32_t UP = (120 + 127) << 7, LARGEST = 0x7F7F7F7Fu;
  const auto pair = [&](uint32_t word, uint32_t which) {
    const uint32_t codes = shift_codes(word, which);
    if constexpr (FAST) return ptx::mul_rn_bf16x2(codes, power);
    const uint32_t number = ptx::mul_rn_bf16x2(codes, UP | UP << 16);  // exact
    return ptx::min_xorsign_abs_bf16x2(ptx::mul_rn_bf16x2(number, power), LARGEST);
  };
  return make_uint4(pair(x, FIRST_CODES), pair(x, SECOND_CODES), pair(y, FIRST_CODES), pair(y, SECOND_CODES));
}

}  // namespace backward
