// From FP32 tiles to the gradients that the user gets: the query heads of a group are summed in ascending order, a
// folded exponent is undone on each row (Note [Folded exponents] of flamia.reference.operands), the result is
// rounded once to the user's dtype, and padding rows become zeros.
#include "common/padding.cuh"
#include "common/tokens.cuh"

struct EpilogueParams {
  const float* partial;    // (heads * group, max_tiles, 128, head_dim)
  const float* exponents;  // (heads, max_tiles, 128), or null
  Tokens out;              // (T, heads, head_dim)
  Padding padding;
  const layout::Tile* tiles;
  const int32_t* status;
  int64_t max_tiles;
  int32_t heads;
  int32_t group;
  int32_t head_dim;
  int32_t unused;
};
static_assert(sizeof(EpilogueParams) == PARAMS_BYTES, "EpilogueParams must match structs.EPILOGUE");

using Element = formats::Given;
constexpr int THREADS = 256;

// x * 2^exponent for any integer exponent of an E8M0 scale: one rounding, as in FP32 with the exact power. The power
// 2^-128 and those below are no normal numbers, 2^128 is none at all; exponents here are -(byte - 127) and 8.
__device__ __forceinline__ float scale_exactly(float x, float exponent) {
  const int e = int(exponent);
  const float power = e < -126 ? __uint_as_float(0x00400000u) : __uint_as_float(uint32_t(e + 127) << 23);
  return __fmul_rn(x, exponent == exponent ? power : exponent);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) reduce_heads(const __grid_constant__ EpilogueParams p) {
  const int pieces = p.head_dim / 4;
  const uint32_t units = uint32_t(p.status[layout::NUM_TILES]) * uint32_t(p.heads);
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const uint32_t index = unit / p.heads, head = unit % p.heads;
    const layout::Tile tile = p.tiles[index];
    for (int i = threadIdx.x; i < tile.rows * pieces; i += THREADS) {
      const int row = i / pieces, channel = i % pieces * 4;
      float sum[4];
      for (int g = 0; g < p.group; ++g) {
        const int64_t slot = (int64_t(head) * p.group + g) * p.max_tiles + index;
        const uint4 bits = ptx::ld_global_nc_v4(p.partial + (slot * layout::TILE + row) * p.head_dim + channel);
        const float x[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                            __uint_as_float(bits.w)};
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] = g == 0 ? x[k] : __fadd_rn(sum[k], x[k]);
      }
      if (p.exponents != nullptr) {
        const float exponent = -p.exponents[(head * p.max_tiles + index) * layout::TILE + row];
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] = scale_exactly(sum[k], exponent);
      }
      uint8_t* const to = static_cast<uint8_t*>(const_cast<void*>(p.out.data)) +
                          ((int64_t(tile.start) + row) * p.out.token_stride + head * p.out.head_stride + channel) *
                              Element::BYTES;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (Element::BYTES == 4) {
          ptx::st_global_b32(to + 4 * k, Element::narrow(sum[k]));
        } else {
          ptx::st_global_u16(to + 2 * k, Element::narrow(sum[k]));
        }
      }
    }
  }
  clear_padding(p.padding, p.status);
}
