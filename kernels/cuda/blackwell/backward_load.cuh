// The roles that bring things: one thread takes work items, publishes them, and fetches tiles and scales by bulk
// copies; two warps prepare what belongs to columns.
#pragma once

#include "blackwell/backward_numbers.cuh"
#include "blackwell/backward_params.cuh"

namespace blackwell::backward {

__device__ __forceinline__ void fetch(void* to, const void* from, uint32_t bytes, const uint64_t& barrier) {
  ptx::cp_async_bulk_shared_global(at(to), from, bytes, at(&barrier));
}

// Item `item`, or its second query tile. An item of the forward's list has one or two; `tiles` is 0 for one that it
// lacks, and for heads of other launches.
__device__ __forceinline__ Work describe_item(const BackwardParams& p, const int4& item, int second) {
  const int base = p.tile_offsets[item.x], count = p.tile_offsets[item.x + 1] - base, index = item.z + second;
  Work work = {};
  const int kv_head = KEYS ? item.y : item.y / p.group;
  if (index >= count || kv_head < p.first_head || kv_head >= p.last_head) return work;
  work.base = base;
  work.count = count;
  const int owner = int(item.y * p.max_tiles) + base + index;
  work.slot = owner;
  work.head = item.y;
  work.tile = base + index;
  const layout::Tile tile = p.tiles[base + index];
  work.rows = tile.rows;
  work.pair = first_pair(p.causal, p.longest, item.x, tile.start - index * TILE);
  work.columns = p.tiles[base + count - 1].rows;
  if constexpr (KEYS) {
    work.tiles = p.causal ? count - index : count;
    work.stream = int(item.y * p.group * p.max_tiles) + base + (p.causal ? index : 0);
    work.diagonal = p.causal ? 0 : -1;
  } else {
    work.tiles = p.causal ? index + 1 : count;
    work.stream = int(item.y / p.group * p.max_tiles) + base;
    work.diagonal = p.causal ? index : -1;
  }
  return work;
}

// The first tile that streams by for member g of the group, in payloads.
__device__ __forceinline__ int64_t stream_slot(const BackwardParams& p, const Work& work, int g) {
  return work.stream + g * p.max_tiles;
}

__device__ __forceinline__ void fetch_fixed(const BackwardParams& p, Shared& shared, Ring<FIXED_STAGES>& ring, const Work& work) {
  const uint64_t& full = shared.fixed_full[ring.stage];
  Fixed& to = shared.fixed[ring.stage];
  const int64_t slot = work.slot;
  const bool both = KEYS && p.causal;
  wait(shared.fixed_empty[ring.stage], ring.phase ^ 1);
  ptx::mbarrier_arrive_expect_tx(at(&full), SCORE_TILE + SCORE_SCALES + (both ? 2 : 1) * (VALUE_TILE + SCALES));
  fetch(to.score, (KEYS ? p.k : p.q) + slot * SCORE_TILE, SCORE_TILE, full);
  fetch(to.score_scales, (KEYS ? p.k_scales : p.q_scales) + slot * SCORE_SCALES, SCORE_SCALES, full);
  fetch(to.gradient[0], (KEYS ? p.v : p.dout) + slot * VALUE_TILE, VALUE_TILE, full);
  fetch(to.gradient_scales[0], (KEYS ? p.v_scales : p.dout_scales) + slot * SCALES, SCALES, full);
  if (both) {
    fetch(to.gradient[KEYS ? 1 : 0], p.v1 + slot * VALUE_TILE, VALUE_TILE, full);
    fetch(to.gradient_scales[KEYS ? 1 : 0], p.v1_scales + slot * SCALES, SCALES, full);
  }
  ring.advance();
}

__device__ __forceinline__ void fetch_scores(const BackwardParams& p, Shared& shared, Ring<STREAM_STAGES>& ring, int64_t slot) {
  const uint64_t& full = shared.score_full[ring.stage];
  ScoreStage& to = shared.scores[ring.stage];
  wait(shared.score_empty[ring.stage], ring.phase ^ 1);
  ptx::mbarrier_arrive_expect_tx(at(&full), sizeof(to.payload) + SCORE_SCALES);
  fetch(to.payload, (KEYS ? p.q : p.k) + slot * SCORE_TILE, SCORE_TILE, full);
  if (TOKEN_COPY) fetch(to.payload + TOKENS_AT, (KEYS ? p.q_tokens : p.k_tokens) + slot * VALUE_TILE, VALUE_TILE, full);
  fetch(to.scales, (KEYS ? p.q_scales : p.k_scales) + slot * SCORE_SCALES, SCORE_SCALES, full);
  ring.advance();
}

// The owner of queries reads V1 in place of V32 in the diagonal tile.
__device__ __forceinline__ void fetch_gradients(const BackwardParams& p, Shared& shared, Ring<STREAM_STAGES>& ring, int64_t slot,
                                                bool diagonal) {
  const uint64_t& full = shared.gradient_full[ring.stage];
  GradientStage& to = shared.gradients[ring.stage];
  wait(shared.gradient_empty[ring.stage], ring.phase ^ 1);
  ptx::mbarrier_arrive_expect_tx(at(&full), VALUE_TILE + (KEYS ? 2 : 1) * SCALES);
  fetch(to.payload, (KEYS ? p.dout : diagonal ? p.v1 : p.v) + slot * VALUE_TILE, VALUE_TILE, full);
  fetch(to.scales, (KEYS ? p.dout_scales : diagonal ? p.v1_scales : p.v_scales) + slot * SCALES, SCALES, full);
  if (KEYS) fetch(to.token_scales, p.dout_token_scales + slot * SCALES, SCALES, full);
  ring.advance();
}

__device__ __forceinline__ void load(const BackwardParams& p, Shared& shared) {
  Ring<WORK_STAGES> works;
  Ring<FIXED_STAGES> fixed;
  Ring<STREAM_STAGES> scores, gradients;
  const int items = p.status[p.num_items];
  for (bool more = true; more;) {
    const int taken = atomicAdd(p.ticket, 1);
    more = taken < items;
#pragma unroll 1
    for (int second = 0; second < (KEYS || !more ? 1 : 2); ++second) {
      Work work = {};
      if (more) work = describe_item(p, p.items[taken], second);
      if (more && work.tiles == 0) continue;
      wait(shared.work_empty[works.stage], works.phase ^ 1);
      shared.work[works.stage] = work;
      ptx::mbarrier_arrive(at(&shared.work_full[works.stage]));
      works.advance();
      if (!more) break;
      fetch_fixed(p, shared, fixed, work);
      for (int g = 0; g < (KEYS ? p.group : 1); ++g) {
        for (int j = 0; j < work.tiles; ++j) {
          fetch_scores(p, shared, scores, stream_slot(p, work, g) + j);
          fetch_gradients(p, shared, gradients, stream_slot(p, work, g) + j, j == work.diagonal);
        }
      }
    }
  }
  if (atomicAdd(p.ticket + 1, 1) == int(gridDim.x) - 1) p.ticket[0] = p.ticket[1] = 0;
}

// ---- columns ---------------------------------------------------------------------------------------------------

// One column; returns whether it is usual, and its |m|.
__device__ __forceinline__ bool prepare_column(const BackwardParams& p, Columns& columns, int64_t slot, int column,
                                               float& reach) {
  const int64_t where = slot * TILE + column;
  if constexpr (KEYS) {
    const float top = p.top[where], exponent = p.q_exponents[where], delta = p.delta[where], power = power_of(exponent);
    columns.power[column] = power;
    columns.minus[column] = -__fmul_rn(delta, power);
    const float shift = shift_of(top);
    columns.shift[column] = shift;
    columns.below[column] = __fsub_rn(shift, 1.0f);
    columns.delta[column] = delta;
    columns.top[column] = top;
    reach = reach_of(top);
    return is_usual_top(top) && is_usual_exponent(exponent) && is_usual_delta(delta);
  } else {
    const float exponent = p.k_exponents[where];
    columns.power[column] = power_of(exponent);
    reach = 0.0f;
    return is_usual_exponent(exponent);
  }
}

__device__ __forceinline__ void prepare_columns(const BackwardParams& p, Shared& shared) {
  const int warp = threadIdx.x / 32 - COLUMN_WARP, lane = threadIdx.x % 32;
  Ring<WORK_STAGES> works;
  Ring<COLUMN_STAGES> ring;
  for (;; works.advance()) {
    wait(shared.work_full[works.stage], works.phase);
    const Work work = shared.work[works.stage];
    arrive_warp(shared.work_empty[works.stage]);
    if (work.tiles == 0) break;
    for (int g = 0; g < (KEYS ? p.group : 1); ++g) {
      for (int j = 0; j < work.tiles; ++j) {
        Columns& to = shared.columns[ring.stage];
        wait(shared.columns_empty[ring.stage], ring.phase ^ 1);
        const int64_t slot = stream_slot(p, work, g) + j;
        const int column = TILE / COLUMN_WARPS * warp + lane;
        float reach, reach_too;
        const bool usual = prepare_column(p, to, slot, column, reach);
        const bool usual_too = prepare_column(p, to, slot, column + 32, reach_too);
        const bool unusual = ptx::vote_any(!usual || !usual_too);
        const uint32_t farthest = ptx::redux_max_u32(__float_as_uint(fmaxf(reach, reach_too)));
        if (lane == 0) {
          to.summary.unusual[warp] = unusual;
          to.summary.reach[warp] = __uint_as_float(farthest);
        }
        arrive_warp(shared.columns_full[ring.stage]);
        ring.advance();
      }
    }
  }
}

}  // namespace blackwell::backward
