// What a key tile tells the Hopper kernels beside its payload.
//
// Note [Factor tile]
// ~~~~~~~~~~~~~~~~~~
// For every tile of K, 132 words: the scale of each key as FP32, NaN for a lost key and past the document; the first
// lost token of K and of V, 128 without one; the largest exponent of K; whether an exponent is so far from 0 that the
// kernels take their slow path. A row that sees a lost token is set to NaN in the end, whatever it holds.
//
// The scales of every 16 keys are in the order in which threads need them: a thread has the columns 8 i + 2 q + c of an
// accumulator, with one q, and those of one q and two i are adjacent: 16 bytes.
#pragma once

#include "common/formats.cuh"
#include "common/layout.cuh"

namespace hopper {

constexpr int FACTOR_WORDS = layout::TILE + 4;

// Where the scale of a key is.
__device__ __forceinline__ int factor_word(int key) {
  return key / 16 * 16 + key / 2 % 4 * 4 + key / 8 % 2 * 2 + key % 2;
}

// Exponents of token scales up to this magnitude are usual: no product of two of them and c leaves the normal numbers.
constexpr float USUAL_EXPONENT = 60.0f;

// The last words of a factor tile.
struct KeyTile {
  int32_t first_lost_k;
  int32_t first_lost_v;
  float largest_exponent;
  int32_t unusual;
};
static_assert(sizeof(KeyTile) == 16, "one 16-byte load");

// The functions below are called by one warp; each lane speaks for the tokens 32 b + lane of a tile of `rows` tokens.

// The first token for which a lane says so; 128 without one.
__device__ __forceinline__ int first_of(const bool (&is)[layout::BLOCKS]) {
  int first = layout::TILE;
#pragma unroll
  for (int b = layout::BLOCKS - 1; b >= 0; --b) {
    const uint32_t ballot = ptx::vote_ballot(is[b]);
    if (ballot) first = layout::BLOCK * b + __ffs(ballot) - 1;
  }
  return first;
}

// What K tells, from its exponents, NaN for a lost token. Unscaled keys have the factor 1.
__device__ __forceinline__ void write_key_factors(float* to, const float (&e)[layout::BLOCKS], int rows, bool scaled) {
  const int lane = threadIdx.x % 32;
  bool lost[layout::BLOCKS], extreme = false;
  float largest = -127.0f;
#pragma unroll
  for (int b = 0; b < layout::BLOCKS; ++b) {
    const int row = layout::BLOCK * b + lane;
    const bool known = row < rows && e[b] == e[b];
    lost[b] = row < rows && e[b] != e[b];
    if (known) {
      largest = fmaxf(largest, e[b]);
      extreme |= scaled && fabsf(e[b]) > USUAL_EXPONENT;
    }
    to[factor_word(row)] = !known ? __uint_as_float(0x7FC00000u) : scaled ? formats::decode_e8m0(uint32_t(int(e[b]) + 127)) : 1.0f;
  }
  const int first = first_of(lost);
  const uint32_t top = ptx::redux_max_u32(uint32_t(int(largest) + 127));
  const bool far = ptx::vote_ballot(extreme) != 0;
  if (lane == 0) {
    KeyTile* const tile = reinterpret_cast<KeyTile*>(to + layout::TILE);
    tile->first_lost_k = first;
    tile->largest_exponent = float(int(top) - 127);
    tile->unusual = far;
  }
}

// What V tells.
__device__ __forceinline__ void write_lost_values(float* to, const bool (&lost)[layout::BLOCKS]) {
  const int first = first_of(lost);
  if (threadIdx.x % 32 == 0) reinterpret_cast<KeyTile*>(to + layout::TILE)->first_lost_v = first;
}

}  // namespace hopper
