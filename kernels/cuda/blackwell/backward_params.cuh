// Parameters of the backward, as the host fills them: structs.BLACKWELL_BACKWARD.
#pragma once

#include "common/layout.cuh"
#include "common/pairs.cuh"

namespace blackwell::backward {

// Gradients (T, H, D); strides in bytes, rows at multiples of 16.
struct Gradient {
  uint8_t* data;
  int64_t token_stride;
  int64_t head_stride;
};

struct BackwardParams {
  const uint8_t* q;         // (Hq, max_tiles, 128 SCORE_ROW), E4M3 or packed E2M1, as the forward reads it
  const uint8_t* q_scales;  // (Hq, max_tiles, SCORE_SCALES), contraction over channels
  const uint8_t* q_tokens;  // (Hq, max_tiles, 128 D), E4M3 in token blocks of 1; the same array as q where that is E4M3
  const float* q_exponents;  // (Hq, max_tiles, 128), Note [Folded exponents] of flamia.reference.operands
  const uint8_t* k;          // (Hkv, ..) as q
  const uint8_t* k_scales;
  const uint8_t* k_tokens;
  const float* k_exponents;
  const uint8_t* v;          // V32: (Hkv, max_tiles, 128 D), E4M3
  const uint8_t* v_scales;   // (Hkv, max_tiles, 512), contraction over channels
  const uint8_t* v1;         // V1, for the diagonal tile; null if not causal
  const uint8_t* v1_scales;  // as v_scales
  const uint8_t* dout;       // (Hq, max_tiles, 128 D), E4M3 in token blocks of 32
  const uint8_t* dout_scales;        // (Hq, max_tiles, 512), contraction over channels
  const uint8_t* dout_token_scales;  // (Hq, max_tiles, 512), contraction over tokens
  const float* delta;                // (Hq, max_tiles, 128)
  const float* top;                  // as delta: m, +inf in inactive rows, NaN in lost ones
  Gradient first;                    // dV of the owner of keys, dQ of the owner of queries
  Gradient second;                   // dK of the owner of keys
  float* totals;                     // (CTAs, 2, D / 4, 128, 4): dV and dK of the heads of a group so far; null for one
  uint8_t* x;         // Note [Stored X] of dq.cu: (pairs, 16384) codes of X at a multiple of 64, written by the owner of keys; or null
  uint8_t* x_scales;  // (pairs, 4 key blocks, 4 query blocks)
  const layout::Tile* tiles;
  const int32_t* tile_offsets;
  const int4* items;  // of the backward for the owner of keys, of the forward for the owner of queries
  const int32_t* status;
  int32_t* ticket;         // the next item, and how many CTAs have found none; both 0 before and after a launch
  uint8_t* stage_p;        // (Hq, max_tiles, stage_tiles, 128 rows, 128): codes of P; with hooks only, as all of these
  uint8_t* stage_p_scale;  // (Hq, max_tiles, stage_tiles, 4 row blocks, 4): scale bytes
  uint8_t* stage_x;        // of X, likewise
  uint8_t* stage_x_scale;
  int64_t max_tiles;
  int64_t pairs;        // of a query head in `x`
  float c;              // softmax_scale log2(e)
  float largest_score;  // about 2^20 / c
  float score_factor;   // of NVFP4's head scales
  float softmax_scale;
  int32_t usual;  // Note [Fast tiles] of backward_numbers.cuh holds for the constants
  int32_t group;  // query heads of a KV head
  int32_t causal;
  int32_t element;  // of the gradients: 0 bfloat16, 1 float16, 2 float32
  int32_t num_items;  // entry of `status` that holds the number of items
  int32_t stage_tiles;
  int32_t first_head;  // KV heads of this launch
  int32_t last_head;   // one past the last
  int32_t longest;     // tiles of a document at most
  int32_t unused;
};
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "BackwardParams must match structs.BLACKWELL_BACKWARD");

using layout::pair_of;  // where X of query tile i and key tile j of a document lies in `x`, within its head
using layout::first_pair;

}  // namespace blackwell::backward
