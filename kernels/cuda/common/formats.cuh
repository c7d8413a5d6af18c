// Number formats: the CUDA form of flamia.reference.formats and .scaling. Where the target has the conversion
// instruction it is used; the software form beside it gives the same bytes, and the kernel `formats` compares them.
#pragma once

#include "common/ptx.cuh"

namespace formats {

constexpr uint32_t SIGN = 0x80000000u;
constexpr uint32_t MAGNITUDE = 0x7FFFFFFFu;
constexpr uint32_t EXPONENT = 0x7F800000u;  // a magnitude above is NaN, one equal to it is Inf

constexpr uint32_t E8M0_NAN = 255;
constexpr uint32_t UE4M3_NAN = 0x7F;

// ---- software encoders -----------------------------------------------------------------------------------------

// An element format by Note [Quantum] of flamia.reference.formats: adding 2^23 quanta to |x| rounds it, and the
// fields of the sum, added together, are the code.
template <int MANTISSA_BITS, int BITS, uint32_t MAX_FINITE, uint32_t MIN_NORMAL, uint32_t NAN_CODE>
struct Element {
  static_assert(MIN_NORMAL % (1u << 23) == 0, "the smallest normal value is a power of two");
  static constexpr uint32_t LIFT = (23u - MANTISSA_BITS) << 23;
  static constexpr uint32_t SHIFT = 23u - MANTISSA_BITS;
  static constexpr uint32_t ORIGIN = (MIN_NORMAL + LIFT) >> SHIFT;

  __device__ static __forceinline__ uint32_t encode(float x) {
    return (__float_as_uint(x) & MAGNITUDE) > EXPONENT ? NAN_CODE : encode_number(x);
  }

  // The same for an x that is not NaN; of a NaN some code.
  __device__ static __forceinline__ uint32_t encode_number(float x) {
    const uint32_t bits = __float_as_uint(x);
    const uint32_t clipped = min(bits & MAGNITUDE, MAX_FINITE);
    const uint32_t power = max((clipped & EXPONENT) + LIFT, MIN_NORMAL + LIFT);
    const uint32_t total = __float_as_uint(__fadd_rn(__uint_as_float(clipped), __uint_as_float(power)));
    const uint32_t code = (total >> SHIFT) + total - ORIGIN & (1u << (BITS - 1)) - 1;
    return code | bits >> (32 - BITS) & 1u << (BITS - 1);
  }
};

using E4M3 = Element<3, 8, 0x43E00000u /* 448 */, 0x3C800000u /* 2^-6 */, 0x7F>;
using E2M1 = Element<1, 4, 0x40C00000u /* 6 */, 0x3F800000u /* 1 */, 0x7>;

// The smallest power of two that is at least |x|, as its E8M0 byte.
__device__ __forceinline__ uint32_t encode_e8m0_rp_software(float x) {
  const uint32_t magnitude = __float_as_uint(x) & MAGNITUDE;
  const uint32_t field = magnitude >> 23, mantissa = magnitude & 0x7FFFFFu;
  const uint32_t inexact = mantissa > (field == 0 ? 0x400000u : 0u);
  return magnitude > EXPONENT ? E8M0_NAN : min(field + inexact, 254u);
}

// ---- encoders --------------------------------------------------------------------------------------------------

// Four E4M3 codes, the first in the lowest byte.
__device__ __forceinline__ uint32_t encode_e4m3x4(float a, float b, float c, float d) {
  return ptx::cvt_rn_satfinite_e4m3x2_f32(b, a) | ptx::cvt_rn_satfinite_e4m3x2_f32(d, c) << 16;
}

// A UE4M3 byte of x >= 0; NaN gives 0x7F.
__device__ __forceinline__ uint32_t encode_ue4m3(float x) {
  return ptx::cvt_rn_satfinite_e4m3x2_f32(0.0f, x) & 0x7F;
}

// Note [Eight E2M1 codes]
// ~~~~~~~~~~~~~~~~~~~~~~~
// E2M1's quantum is 1/2 below 2, then 1, then 2 from 4 on. With N(y) = y rounded to an integer, ties to even, the code
// of a magnitude y is therefore N(2y) below 2, N(y) + 2 below 4, N(y/2) + 4 below 7; and of the three numbers it is
// always the smallest, because each is N of a line, rounding is monotone, and the right line is the lowest. Two N at
// once are one conversion to binary16 in its subnormal range, whose codes are the integers: N(y) is the code of
// 2^-24 y. The sign comes along in the top bit of the half, through the minimum too.

// E2M1 codes of x[i] * inv, that of x[0] in the lowest nibble. Where the target has no instruction for it: for |x[i] *
// inv| < 7, and inv from 2^-64 to 2^64, so that inv times 2^-25 is exact.
__device__ __forceinline__ uint32_t encode_e2m1x8(const float* x, float inv) {
#if HAS_NARROW_CVT
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    codes |= ptx::cvt_rn_satfinite_e2m1x2_f32(__fmul_rn(x[i + 1], inv), __fmul_rn(x[i], inv)) << 4 * i;
  }
  return codes;
#else
  // Products with powers of two are exact, or so small that the code is 0 either way.
  const float halves = __fmul_rn(inv, 0x1p-23f), ones = __fmul_rn(inv, 0x1p-24f), twos = __fmul_rn(inv, 0x1p-25f);
  uint32_t codes[4];  // of x[i] and x[i + 4], a half each
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = ptx::cvt_rn_f16x2_f32(__fmul_rn(x[i + 4], halves), __fmul_rn(x[i], halves));
    const uint32_t middle = ptx::cvt_rn_f16x2_f32(__fmul_rn(x[i + 4], ones), __fmul_rn(x[i], ones));
    const uint32_t high = ptx::cvt_rn_f16x2_f32(__fmul_rn(x[i + 4], twos), __fmul_rn(x[i], twos));
    const uint32_t below_4 = ptx::min_u16x2(ptx::add_u16x2(middle, 0x00020002u), low);
    codes[i] = ptx::min_u16x2(ptx::add_u16x2(high, 0x00040004u), below_4);
  }
  // Bytes of a half: the code, and 0x80 for a negative one.
  const uint32_t even = ptx::prmt(codes[0], codes[2], 0x6240), even_sign = ptx::prmt(codes[0], codes[2], 0x7351);
  const uint32_t odd = ptx::prmt(codes[1], codes[3], 0x6240), odd_sign = ptx::prmt(codes[1], codes[3], 0x7351);
  return even + (even_sign >> 4) + (odd << 4) + odd_sign;
#endif
}

// Whether encode_e2m1x8 may be given a factor, and numbers up to `amax`; false for NaN.
__device__ __forceinline__ bool fits_e2m1x8(float amax, float inv) {
#if HAS_NARROW_CVT
  return __float_as_uint(amax) < EXPONENT;
#else
  return __fmul_rn(amax, inv) < 7.0f && inv >= 0x1p-64f && inv <= 0x1p64f;
#endif
}

// One E2M1 code, NaN included, which gives 7.
__device__ __forceinline__ uint32_t encode_e2m1(float x) {
#if HAS_NARROW_CVT
  return ptx::cvt_rn_satfinite_e2m1x2_f32(0.0f, x) & 0xF;
#else
  return E2M1::encode(x);
#endif
}

__device__ __forceinline__ uint32_t encode_e8m0_rp(float x) {
#if HAS_NARROW_CVT
  return ptx::cvt_rp_satfinite_ue8m0x2_f32(0.0f, x) & 0xFF;
#else
  return encode_e8m0_rp_software(x);
#endif
}

// ---- scales ----------------------------------------------------------------------------------------------------

// The E8M0 byte of a block of E4M3 elements with largest magnitude amax: Note [RCEIL] of flamia.reference.scaling.
__device__ __forceinline__ uint32_t rceil_e4m3(float amax) {
  return encode_e8m0_rp(__fmul_rn(amax, __uint_as_float(0x3B124925u) /* fl(1/448) */));
}

// 2^(byte - 127) for a byte below 255; byte 0 is the subnormal 2^-127.
__device__ __forceinline__ float decode_e8m0(uint32_t byte) {
  return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23);
}

// 2^(127 - byte), what elements are multiplied by before they are encoded, for a byte below 254.
__device__ __forceinline__ float inverse_e8m0(uint32_t byte) { return __uint_as_float((254u - byte) << 23); }

// ---- decoders --------------------------------------------------------------------------------------------------

// The value of the E4M3 code in the low byte.
__device__ __forceinline__ float decode_e4m3(uint32_t code) {
  return ptx::cvt_f32_f16(ptx::cvt_rn_f16x2_e4m3x2(code & 0xFF) & 0xFFFF);
}

// Values of the two E4M3 codes in the low half.
__device__ __forceinline__ float2 decode_e4m3x2(uint32_t codes) {
  const uint32_t halves = ptx::cvt_rn_f16x2_e4m3x2(codes);
  return make_float2(ptx::cvt_f32_f16(halves), ptx::cvt_f32_f16(halves >> 16));
}

// The value of an E2M1 code: exponent and mantissa fields moved to binary32's, then scaled by 2^(127 - 1).
__device__ __forceinline__ float decode_e2m1(uint32_t code) {
  const float magnitude = __fmul_rn(__uint_as_float((code & 7) << 22), __uint_as_float(253u << 23));
  return __uint_as_float(__float_as_uint(magnitude) | (code & 8) << 28);
}

// ---- the user's elements ---------------------------------------------------------------------------------------

// `larger`: of the elements in two words, two by two, the larger magnitude, under a sign that means nothing; NaN where
// one is NaN.
struct BF16 {
  static constexpr int BYTES = 2;
  static constexpr uint32_t INFINITE = 0x7F80;  // magnitudes from here on are not finite
  __device__ static __forceinline__ float widen(uint32_t bits) { return __uint_as_float(bits << 16); }
  __device__ static __forceinline__ uint32_t narrow(float x) { return ptx::cvt_rn_bf16_f32(x); }
  __device__ static __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    return ptx::max_nan_xorsign_abs_bf16x2(a, b);
  }
};

struct FP16 {
  static constexpr int BYTES = 2;
  static constexpr uint32_t INFINITE = 0x7C00;
  __device__ static __forceinline__ float widen(uint32_t bits) { return ptx::cvt_f32_f16(bits); }
  __device__ static __forceinline__ uint32_t narrow(float x) { return ptx::cvt_rn_f16_f32(x); }
  __device__ static __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    return ptx::max_nan_xorsign_abs_f16x2(a, b);
  }
};

struct FP32 {
  static constexpr int BYTES = 4;
  static constexpr uint32_t INFINITE = EXPONENT;
  __device__ static __forceinline__ float widen(uint32_t bits) { return __uint_as_float(bits); }
  __device__ static __forceinline__ uint32_t narrow(float x) { return __float_as_uint(x); }
  __device__ static __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
    return __float_as_uint(ptx::max_nan_xorsign_abs_f32(__uint_as_float(a), __uint_as_float(b)));
  }
};

#if defined(ELEMENT_IS_BF16)
using Given = BF16;
#elif defined(ELEMENT_IS_FP16)
using Given = FP16;
#elif defined(ELEMENT_IS_FP32)
using Given = FP32;
#endif

}  // namespace formats
