// Rows of the user's tensors: a warp reads several tokens at once, 16 bytes per lane and step.
//
// Note [Lanes of a token]
// ~~~~~~~~~~~~~~~~~~~~~~~
// A row of D elements is CHUNKS pieces of 16 bytes. LANES = the power of two from CHUNKS on, at most 32, lanes
// read one token, PER_LANE pieces each; with D = 128 in bf16 a warp reads two tokens of 16 lanes. The lanes of one
// token are aligned in the warp, so butterfly shuffles over 1, 2, ..., LANES / 2 lanes reduce over its channels.
// A CTA owns a tile of 128 tokens, which it keeps in registers: 8 warps with 16 consecutive tokens each, so that two
// share a token block of 32; or 16 warps with 8 tokens where a row has more than 256 bytes.
#pragma once

#include "common/formats.cuh"
#include "common/layout.cuh"

// A strided tensor (T, H, D), channels adjacent. Offsets are 64 bits.
struct Tokens {
  const void* data;
  int64_t token_stride;
  int64_t head_stride;
};

__device__ constexpr int warp_power_of_two(int n) { return n <= 1 ? 1 : 2 * warp_power_of_two((n + 1) / 2); }

template <class Element_, int HEAD_DIM_>
struct Rows {
  using Element = Element_;
  static constexpr int D = HEAD_DIM_;
  static constexpr int WARPS = D * Element::BYTES <= 256 ? 8 : 16;
  static constexpr int WARPS_PER_BLOCK = WARPS / layout::BLOCKS;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int VALUES = 16 / Element::BYTES;  // elements of a piece
  static constexpr int CHUNKS = D / VALUES;
  static constexpr int LANES = warp_power_of_two(CHUNKS) < 32 ? warp_power_of_two(CHUNKS) : 32;
  static constexpr int PER_LANE = (CHUNKS + LANES - 1) / LANES;
  static constexpr int AT_ONCE = 32 / LANES;  // tokens of a step
  static constexpr int TOKENS = layout::TILE / WARPS;
  static constexpr int STEPS = TOKENS / AT_ONCE;
  static_assert(D % 32 == 0 && D > 0 && D <= 256, "HEAD_DIM must be a multiple of 32 up to 256");
  static_assert(TOKENS % AT_ONCE == 0, "a warp's tokens are read in whole steps");

  __device__ static __forceinline__ int warp() { return threadIdx.x / 32; }
  // The lane's place among the lanes of its token.
  __device__ static __forceinline__ int lane() { return threadIdx.x % LANES; }
  // Row in the tile of the token that this lane reads in a step.
  __device__ static __forceinline__ int row(int step) {
    return warp() * TOKENS + step * AT_ONCE + threadIdx.x % 32 / LANES;
  }
  // First channel of the lane's piece.
  __device__ static __forceinline__ int channel(int piece) { return (lane() + piece * LANES) * VALUES; }
  __device__ static __forceinline__ bool has_piece(int piece) {
    return CHUNKS % LANES == 0 || lane() + piece * LANES < CHUNKS;
  }

  // The largest of the values that the warps of token block b found.
  __device__ static __forceinline__ uint32_t over_block(const uint32_t* of_warp, int b) {
    uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < WARPS_PER_BLOCK; ++w) largest = max(largest, of_warp[b * WARPS_PER_BLOCK + w]);
    return largest;
  }

  // 16 bytes of a token; ALIGNED: every row starts at a multiple of 16 bytes.
  template <bool ALIGNED>
  __device__ static __forceinline__ uint4 load_piece(const void* at) {
    if (ALIGNED) return ptx::ld_global_nc_v4(at);
    uint32_t word[4];
    const uint8_t* const from = static_cast<const uint8_t*>(at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (Element::BYTES == 4) {
        word[i] = ptx::ld_global_nc_b32(from + 4 * i);
      } else {
        word[i] = ptx::ld_global_nc_u16(from + 4 * i) | ptx::ld_global_nc_u16(from + 4 * i + 2) << 16;
      }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }

  template <bool ALIGNED, int COUNT>
  __device__ static __forceinline__ void load_all(uint4 (&piece)[COUNT][PER_LANE], const uint8_t* head, int64_t stride,
                                                  const layout::Tile& tile, int step) {
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const uint8_t* const from = head + (int64_t(tile.start) + row(step + k)) * stride + channel(0) * Element::BYTES;
#pragma unroll
      for (int p = 0; p < PER_LANE; ++p) {
        piece[k][p] = make_uint4(0, 0, 0, 0);
        if (row(step + k) < tile.rows && has_piece(p)) piece[k][p] = load_piece<ALIGNED>(from + p * LANES * 16);
      }
    }
  }

  // The pieces of COUNT steps from `step` on; zeros past the tile's rows and past the row's end. All loads are under
  // way before the first is used.
  template <int COUNT>
  __device__ static __forceinline__ void load(uint4 (&piece)[COUNT][PER_LANE], const Tokens& x, const layout::Tile& tile,
                                              int head, int step) {
    const uint8_t* const from = static_cast<const uint8_t*>(x.data) + head * x.head_stride * Element::BYTES;
    const int64_t stride = x.token_stride * Element::BYTES;
    if ((reinterpret_cast<uint64_t>(from) | stride) % 16 == 0) {
      load_all<true>(piece, from, stride, tile, step);
    } else {
      load_all<false>(piece, from, stride, tile, step);
    }
  }

  // Largest magnitude of a piece's elements as an integer, which orders finite < Inf < NaN. Two-byte elements stay
  // two to a word.
  __device__ static __forceinline__ uint32_t packed_amax(const uint4& x) {
    if (Element::BYTES == 4) {
      return max(max(x.x & formats::MAGNITUDE, x.y & formats::MAGNITUDE),
                 max(x.z & formats::MAGNITUDE, x.w & formats::MAGNITUDE));
    }
    constexpr uint32_t MASK = 0x7FFF7FFFu;
    return ptx::max_u16x2(ptx::max_u16x2(x.x & MASK, x.y & MASK), ptx::max_u16x2(x.z & MASK, x.w & MASK));
  }

  // The larger of two packed magnitudes, element by element.
  __device__ static __forceinline__ uint32_t packed_max(uint32_t a, uint32_t b) {
    return Element::BYTES == 4 ? max(a, b) : ptx::max_u16x2(a, b);
  }

  // From the lane's packed magnitudes to the token's largest one, in every lane of the token.
  __device__ static __forceinline__ uint32_t token_amax(uint32_t packed) {
#pragma unroll
    for (int lanes = 1; lanes < LANES; lanes *= 2) packed = packed_max(packed, ptx::shfl_bfly(packed, lanes));
    return Element::BYTES == 4 ? packed : max(packed & 0xFFFF, packed >> 16);
  }

  // The i-th element of a piece as float32.
  __device__ static __forceinline__ float widen(const uint4& x, int i) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    if (Element::BYTES == 4) return Element::widen(words[i]);
    return Element::widen(i % 2 == 0 ? words[i / 2] & 0xFFFF : words[i / 2] >> 16);
  }
};

// All elements of a piece as float32.
template <class R>
__device__ __forceinline__ void widen_piece(float (&x)[R::VALUES], const uint4& piece) {
#pragma unroll
  for (int i = 0; i < R::VALUES; ++i) x[i] = R::widen(piece, i);
}

// E4M3 codes of a piece's elements times `factor`, VALUES / 4 words; zeros if the token is lost.
template <class R>
__device__ __forceinline__ void encode_piece(uint32_t (&codes)[R::VALUES / 4], const float (&x)[R::VALUES], float factor,
                                             bool lost) {
#pragma unroll
  for (int i = 0; i < R::VALUES / 4; ++i) {
    const uint32_t word = formats::encode_e4m3x4(__fmul_rn(x[4 * i], factor), __fmul_rn(x[4 * i + 1], factor),
                                                 __fmul_rn(x[4 * i + 2], factor), __fmul_rn(x[4 * i + 3], factor));
    codes[i] = lost ? 0 : word;
  }
}

// Store a piece's codes to its place in a payload tile.
template <class R>
__device__ __forceinline__ void store_codes(uint8_t* tile, int row, int channel, const uint32_t (&codes)[R::VALUES / 4]) {
  uint8_t* const to = tile + layout::payload_offset<R::D>(row, channel);
  if constexpr (R::VALUES == 8) {
    ptx::st_global_v2(to, codes[0], codes[1]);
  } else {
    ptx::st_global_b32(to, codes[0]);
  }
}

// ---- scale tiles -----------------------------------------------------------------------------------------------

// Write the scale tiles "channels" of a tile, each row's byte once for each 32 channels: `byte[b]` is that of row
// 32 b + lane. By one warp.
template <int D>
__device__ __forceinline__ void store_block_scales(uint8_t* to, const uint32_t (&byte)[layout::BLOCKS], int lane) {
#pragma unroll
  for (int u = 0; u < (D + 127) / 128; ++u) {
    const int blocks = min(4, D / 32 - 4 * u);
    const uint32_t repeat = 0x01010101u >> (8 * (4 - blocks));
    ptx::st_global_v4(to + u * layout::SCALE_TILE_BYTES + 16 * lane,
                      make_uint4(byte[0] * repeat, byte[1] * repeat, byte[2] * repeat, byte[3] * repeat));
  }
}

// The same from the bytes of all 128 rows.
template <int D>
__device__ __forceinline__ void store_channel_scales(uint8_t* to, const uint8_t* byte, int lane) {
  const uint32_t rows[layout::BLOCKS] = {byte[lane], byte[lane + 32], byte[lane + 64], byte[lane + 96]};
  store_block_scales<D>(to, rows, lane);
}

// Write the scale tiles "tokens" of a tile: the four block bytes, packed in a word, for every channel. By one warp.
template <int D>
__device__ __forceinline__ void store_token_scales(uint8_t* to, uint32_t blocks, int lane) {
#pragma unroll
  for (int u = 0; u < (D + 127) / 128; ++u) {
    const int words = min(4, D / 32 - 4 * u);
    ptx::st_global_v4(to + u * layout::SCALE_TILE_BYTES + 16 * lane,
                      make_uint4(blocks, words > 1 ? blocks : 0, words > 2 ? blocks : 0, words > 3 ? blocks : 0));
  }
}
