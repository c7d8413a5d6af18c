// Payload and scale tiles back to packed FP32 tokens, for debugging and for tests; speed is no aim. Rows past the
// last document are left as they are.
#include "common/tokens.cuh"

struct DecodeParams {
  const uint8_t* payload;      // (heads, max_tiles, 128 D), or 64 D for NVFP4
  const uint8_t* scales;       // contraction over channels
  const float2* head_scales;   // NVFP4: S_enc, S_dec of each head
  Tokens out;                  // float32 (T, heads, D)
  const layout::Tile* tiles;
  const int32_t* status;
  int64_t max_tiles;
  int32_t heads;
  int32_t head_dim;
};
static_assert(sizeof(DecodeParams) == PARAMS_BYTES, "DecodeParams must match structs.DECODE");

constexpr int THREADS = 256;

template <class Decode>
__device__ __forceinline__ void decode_all(const DecodeParams& p, Decode decode) {
  const uint32_t units = uint32_t(p.status[layout::NUM_TILES]) * uint32_t(p.heads);
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const uint32_t index = unit / p.heads, head = unit % p.heads;
    const layout::Tile tile = p.tiles[index];
    for (int i = threadIdx.x; i < tile.rows * p.head_dim; i += THREADS) {
      const int row = i / p.head_dim, channel = i % p.head_dim;
      float* const to = static_cast<float*>(const_cast<void*>(p.out.data)) +
                        (int64_t(tile.start) + row) * p.out.token_stride + head * p.out.head_stride + channel;
      *to = decode(head * p.max_tiles + index, int(head), row, channel);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) decode_tokens(const __grid_constant__ DecodeParams p) {
  decode_all(p, [&](int64_t slot, int, int row, int channel) {
    const int d = p.head_dim, scale_bytes = (d + 127) / 128 * layout::SCALE_TILE_BYTES;
    const uint32_t code = p.payload[slot * (layout::TILE * d) + layout::payload_offset(d, row, channel)];
    const uint32_t byte = p.scales[slot * scale_bytes + channel / 128 * layout::SCALE_TILE_BYTES +
                                   layout::scale_offset(row, channel / 32 % 4)];
    const float scale = byte == formats::E8M0_NAN ? __uint_as_float(0x7FC00000u) : formats::decode_e8m0(byte);
    return __fmul_rn(formats::decode_e4m3(code), scale);
  });
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) decode_nvfp4(const __grid_constant__ DecodeParams p) {
  decode_all(p, [&](int64_t slot, int head, int row, int channel) {
    const int d = p.head_dim;
    const uint32_t pair = p.payload[slot * (layout::TILE * d / 2) + layout::payload_offset(d / 2, row, channel / 2)];
    const uint32_t code = channel % 2 == 0 ? pair & 15 : pair >> 4;
    const uint32_t byte = p.scales[slot * (8 * d) + channel / 64 * layout::SCALE_TILE_BYTES +
                                   layout::scale_offset(row, channel / 16 % 4)];
    return __fmul_rn(__fmul_rn(formats::decode_e2m1(code), formats::decode_e4m3(byte)), p.head_scales[head].y);
  });
}
