// log2 of a row sum in binary64, for the LSE.
//
// Note [Logarithm]
// ~~~~~~~~~~~~~~~~
// x = 2^e y with y in [1, 2). A short r near 1 / y, one of sixteen, makes z = r y - 1 exact and |z| <= 2^-4; log2 x =
// e - log2 r + log2(1 + z), the last by its series up to z^12. From y = 1.5 on, e is one more and log2 r too, so that
// nothing cancels near x = 1. The LSE, once it is rounded to binary32, has the bits of any accurate logarithm but for
// one case in 2^24 or fewer.
#pragma once

#include "common/ptx.cuh"

namespace hopper {

// r, and -log2 r (from k = 8 on, less 1), for y in [1 + k / 16, 1 + (k + 1) / 16).
__constant__ const double LOG2_STEPS[16][2] = {
    {0x1p+0, 0x0p+0},
    {0x1.d4p-1, 0x1.097e38ce60649p-3},
    {0x1.bap-1, 0x1.b2602497d5346p-3},
    {0x1.a4p-1, 0x1.249cd2b13cd6cp-2},
    {0x1.9p-1, 0x1.6cb0f6865c8eap-2},
    {0x1.7ep-1, 0x1.b0b67f4f4681p-2},
    {0x1.6cp-1, 0x1.f804ae8d0cd02p-2},
    {0x1.5cp-1, 0x1.1d368296b5255p-1},
    {0x1.4ep-1, -0x1.88e9c72e0b226p-2},
    {0x1.42p-1, -0x1.52dbdfc4c96b3p-2},
    {0x1.36p-1, -0x1.1ac05b291f07p-2},
    {0x1.2ap-1, -0x1.c0db6cdd94deep-3},
    {0x1.2p-1, -0x1.5c01a39fbd688p-3},
    {0x1.16p-1, -0x1.e72ec117fa5b2p-4},
    {0x1.0cp-1, -0x1.0eb389fa29f9bp-4},
    {0x1p-1, 0x0p+0}};

// Of a positive, normal x.
__device__ __forceinline__ double log2_f64(float x) {
  const uint32_t bits = __float_as_uint(x);
  const double* const step = LOG2_STEPS[bits >> 19 & 15];
  const double y = __uint_as_float((bits & 0x7FFFFFu) | 0x3F800000u);
  const double z = __fma_rn(step[0], y, -1.0);
  double sum = -0.12022458674074694;  // (-1)^n / ((n + 1) ln 2), n from 11 down
  sum = __fma_rn(sum, z, 0.1311540946262694);
  sum = __fma_rn(sum, z, -0.14426950408889633);
  sum = __fma_rn(sum, z, 0.1602994489876626);
  sum = __fma_rn(sum, z, -0.18033688011112042);
  sum = __fma_rn(sum, z, 0.2060992915555662);
  sum = __fma_rn(sum, z, -0.2404491734814939);
  sum = __fma_rn(sum, z, 0.28853900817779266);
  sum = __fma_rn(sum, z, -0.36067376022224085);
  sum = __fma_rn(sum, z, 0.4808983469629878);
  sum = __fma_rn(sum, z, -0.7213475204444817);
  sum = __fma_rn(sum, z, 1.4426950408889634);
  return __dadd_rn(double(int(bits + 0x400000u >> 23) - 127), __fma_rn(sum, z, step[1]));
}

}  // namespace hopper
