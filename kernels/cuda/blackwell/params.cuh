// Parameters of the forward, as the host fills them: structs.BLACKWELL_FORWARD.
#pragma once

#include "common/layout.cuh"

namespace blackwell {

struct ForwardParams {
  const uint8_t* q;         // (Hq, max_tiles, 128 SCORE_ROW), E4M3 or packed E2M1
  const uint8_t* q_scales;  // (Hq, max_tiles, SCORE_SCALES), contraction over channels
  const uint8_t* k;         // (Hkv, ..) as q
  const uint8_t* k_scales;
  const uint8_t* v;          // V32: (Hkv, max_tiles, 128 D), E4M3
  const uint8_t* v_scales;   // (Hkv, max_tiles, 512), contraction over tokens
  const uint8_t* v1;         // V1, for the diagonal tile; null if not causal
  const uint8_t* v1_scales;  // (Hkv, max_tiles, 512), contraction over channels
  uint8_t* out;              // (T, Hq, D): bfloat16, float16 or float32; rows at multiples of 16 bytes
  float* lse;                // (Hq, T); m and l likewise
  float* m;
  float* l;
  const layout::Tile* tiles;
  const int32_t* tile_offsets;
  const int4* items;
  const int32_t* status;
  int32_t* ticket;    // the next item, and how many CTAs have found none; both 0 before and after a launch
  uint8_t* stage_p;   // (Hq, max_tiles, stage_keys, 128, 128): P; with hooks only
  float* stage_top;   // (Hq, max_tiles, stage_keys, 128): m_t
  int64_t max_tiles;
  int64_t num_tokens;
  int64_t out_token_stride;  // bytes
  int64_t out_head_stride;
  float c;             // softmax_scale log2(e)
  float inverse_c;     // about 1 / c
  float score_factor;  // of NVFP4's head scales
  int32_t usual;       // c is from 2^-100 to 2^100, and score_factor is 1
  int32_t group;       // query heads of a KV head
  int32_t causal;
  int32_t element;     // of out: 0 bfloat16, 1 float16, 2 float32
  int32_t stage_keys;
};
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "ForwardParams must match structs.BLACKWELL_FORWARD");

}  // namespace blackwell
