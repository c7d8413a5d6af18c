// The binary logarithm in binary64, by arithmetic alone: no table, and no library function that approximates.
#pragma once

#include "common/ptx.cuh"

namespace logarithm {

// log2(x) of a positive, normal or subnormal x, to 2^-51 relative to max(1, |log2 x|); NaN of NaN, -inf of 0.
//
// x = 2^e y with y in [sqrt(1/2), sqrt(2)): log2 y = 2 / ln 2 (s + s^3 / 3 + s^5 / 5 + ..) with s = (y - 1) / (y + 1), and
// |s| < 0.1716, so that the first term left out, s^23 / 23, is below 2^-62.
__device__ __forceinline__ double log2_of(float x) {
  if (!(x > 0.0f)) return x == 0.0f ? -__longlong_as_double(0x7FF0000000000000ll) : double(x);
  if (!(x <= 3.40282346638528859812e38f)) return double(x);
  uint64_t bits = uint64_t(__double_as_longlong(double(x)));  // normal in binary64
  int exponent = int(bits >> 52) - 1023;
  uint64_t fraction = bits & 0xFFFFFFFFFFFFFull;
  const bool upper = fraction >= 0x6A09E667F3BCDull;  // sqrt(2)
  exponent += upper;
  const double y = __longlong_as_double((long long)(fraction | (upper ? 1022ull : 1023ull) << 52));
  const double s = __ddiv_rn(y - 1.0, y + 1.0), z = __dmul_rn(s, s);
  double sum = 0.0;
#pragma unroll
  for (int k = 21; k >= 1; k -= 2) sum = __fma_rn(sum, z, 1.0 / k);
  return __fma_rn(__dmul_rn(s, sum), 2.8853900817779268147198 /* 2 / ln 2 */, double(exponent));
}

}  // namespace logarithm
