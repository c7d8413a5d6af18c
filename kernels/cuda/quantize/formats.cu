// Every conversion of common/formats.cuh over an array of float32, for tests: the form that the target has and the
// software form, which must give the same bytes.
#include "common/formats.cuh"

struct FormatsParams {
  const float* x;
  uint8_t* out;
  int64_t count;
  int32_t conversion;
  int32_t unused;
};
static_assert(sizeof(FormatsParams) == PARAMS_BYTES, "FormatsParams must match structs.FORMATS");

constexpr int THREADS = 256;

// As `conversions.CONVERSIONS` lists them.
enum Conversion { E4M3_NATIVE, E4M3_SOFTWARE, E2M1_NATIVE, E2M1_SOFTWARE, E8M0_NATIVE, E8M0_SOFTWARE, RCEIL,
                  E2M1_EIGHT };

// The code of x[i] as one of the eight that x[i] lies among; magnitudes from 7 on count as 6, and NaN as -6.
__device__ __forceinline__ uint32_t encode_among_eight(const FormatsParams& p, int64_t i) {
  float x[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float given = p.x[min(i / 8 * 8 + k, p.count - 1)];
    x[k] = formats::fits_e2m1x8(fabsf(given), 1.0f) ? given : fminf(fmaxf(given, -6.0f), 6.0f);
  }
  return formats::encode_e2m1x8(x, 1.0f) >> 4 * (i % 8) & 15;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) convert(const __grid_constant__ FormatsParams p) {
#pragma unroll 1
  for (int64_t i = blockIdx.x * int64_t(THREADS) + threadIdx.x; i < p.count; i += gridDim.x * int64_t(THREADS)) {
    const float x = p.x[i];
    uint32_t code = 0;
    switch (p.conversion) {
      case E4M3_NATIVE: code = formats::encode_e4m3x4(x, 0, 0, 0) & 0xFF; break;
      case E4M3_SOFTWARE: code = formats::E4M3::encode(x); break;
      case E2M1_NATIVE: code = formats::encode_e2m1(x); break;
      case E2M1_SOFTWARE: code = formats::E2M1::encode(x); break;
      case E8M0_NATIVE: code = formats::encode_e8m0_rp(x); break;
      case E8M0_SOFTWARE: code = formats::encode_e8m0_rp_software(x); break;
      case RCEIL: code = formats::rceil_e4m3(x); break;
      case E2M1_EIGHT: code = encode_among_eight(p, i); break;
    }
    p.out[i] = code;
  }
}
