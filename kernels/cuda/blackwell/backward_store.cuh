// The last step of every gradient: a row's exponent undone, its numbers rounded to the user's elements.
#pragma once

#include "blackwell/exp2.cuh"

namespace blackwell::backward {

// 2^e for an integral e, -127..127; NaN stays.
__device__ __forceinline__ float power_of(float e) {
  if (e != e) return e;
  return e < -126.0f ? 0x1p-127f : exp2_integer(e);
}

// 16 columns of a gradient's row.
__device__ __forceinline__ void store_part(uint8_t* to, const float (&x)[16], int element) {
  if (element == 2) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      ptx::st_global_v4(to + 4 * i, make_uint4(__float_as_uint(x[i]), __float_as_uint(x[i + 1]), __float_as_uint(x[i + 2]),
                                               __float_as_uint(x[i + 3])));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; i += 8) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float low = x[i + 2 * k], high = x[i + 2 * k + 1];
      words[k] = element == 1 ? ptx::cvt_rn_f16x2_f32(high, low) : ptx::cvt_rn_bf16x2_f32(high, low);
    }
    ptx::st_global_v4(to + 2 * i, make_uint4(words[0], words[1], words[2], words[3]));
  }
}

}  // namespace blackwell::backward
