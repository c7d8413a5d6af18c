// Wide tiles: payloads as bfloat16 numbers, for kernels that multiply them so. Note [Wide tile] of hopper/tiles.cuh.
//
// Note [Halves with tokens]
// ~~~~~~~~~~~~~~~~~~~~~~~~~
// The Hopper backward takes queries and keys of a tile 64 at a time and passes over a half without a token: nothing
// reads it. So what is written for the backward alone leaves the second half of a tile out if it has at most 64 tokens.
// Under causal attention so does the quantizer: no query sees these keys, and the forward reads none of them either.
#pragma once

#include "common/tokens.cuh"

// Whether a row lies in a half with tokens of a tile that has `rows`.
__device__ __forceinline__ bool in_used_half(int row, int rows) {
  return rows > layout::TILE / 2 || row < layout::TILE / 2;
}

// Store a piece's numbers, two to a word, to their place in a wide tile.
template <class R>
__device__ __forceinline__ void store_pairs(uint8_t* tile, int row, int channel, const uint32_t (&pair)[R::VALUES / 2]) {
  uint8_t* const to = tile + layout::payload_offset<2 * R::D>(row, 2 * channel);
  if constexpr (R::VALUES == 8) {
    ptx::st_global_v4(to, make_uint4(pair[0], pair[1], pair[2], pair[3]));
  } else {
    ptx::st_global_v2(to, pair[0], pair[1]);
  }
}

// Codes of a piece times `factor`, to their place in a wide tile; finite: Note [Own exponents] of
// flamia.reference.profiles.
template <class R>
__device__ __forceinline__ void store_wide(uint8_t* tile, int row, int channel, const uint32_t (&codes)[R::VALUES / 4],
                                           float factor) {
  uint32_t pair[R::VALUES / 2];
#pragma unroll
  for (int i = 0; i < R::VALUES / 2; ++i) {
    const float2 x = formats::decode_e4m3x2(codes[i / 2] >> 16 * (i % 2) & 0xFFFF);
    pair[i] = ptx::cvt_rn_satfinite_bf16x2_f32(__fmul_rn(x.y, factor), __fmul_rn(x.x, factor));
  }
  store_pairs<R>(tile, row, channel, pair);
}
