// The load role: one thread takes work items, publishes them, and fetches tiles and scales by bulk copies.
#pragma once

#include "blackwell/params.cuh"
#include "blackwell/layout.cuh"
#include "blackwell/pipeline.cuh"

namespace blackwell {

__device__ __forceinline__ void fetch(void* to, const void* from, uint32_t bytes, const uint64_t& barrier) {
  ptx::cp_async_bulk_shared_global(at(to), from, bytes, at(&barrier));
}

__device__ __forceinline__ Work describe_item(const ForwardParams& p, const int4& item) {
  const int base = p.tile_offsets[item.x], count = p.tile_offsets[item.x + 1] - base;
  const int head = item.y, first = item.z, tiles = min(count - first, QUERY_TILES);
  Work work;
  work.tiles = tiles;
  work.head = head;
  work.tile = base + first;
  work.query_slot = int32_t(head * p.max_tiles) + base + first;
  work.key_slot = int32_t(head / p.group * p.max_tiles) + base;
  work.keys[0] = p.causal ? first + 1 : count;
  work.keys[1] = tiles == 2 ? (p.causal ? first + 2 : count) : 0;
  work.last_rows = p.tiles[base + count - 1].rows;
  return work;
}

// Scores of query tile i, and in causal attention the exponents of its diagonal tile.
__device__ __forceinline__ void fetch_queries(const ForwardParams& p, Shared& shared, const Work& work, int i) {
  const int64_t slot = work.query_slot + i, diagonal = int64_t(work.key_slot) + work.keys[i] - 1;
  const uint64_t& full = shared.q_full[i];
  ptx::mbarrier_arrive_expect_tx(at(&full), SCORE_TILE + SCORE_SCALES + (p.causal ? SCALES : 0));
  fetch(shared.q[i], p.q + slot * SCORE_TILE, SCORE_TILE, full);
  fetch(shared.q_scales[i], p.q_scales + slot * SCORE_SCALES, SCORE_SCALES, full);
  if (p.causal) fetch(shared.fold[i], p.v1_scales + diagonal * SCALES, SCALES, full);
}

__device__ __forceinline__ void fetch_keys(const ForwardParams& p, Shared& shared, Ring<K_STAGES>& ring, int64_t slot) {
  const uint64_t& full = shared.k_full[ring.stage];
  wait(shared.k_empty[ring.stage], ring.phase ^ 1);
  ptx::mbarrier_arrive_expect_tx(at(&full), SCORE_TILE + SCORE_SCALES);
  fetch(shared.k[ring.stage], p.k + slot * SCORE_TILE, SCORE_TILE, full);
  fetch(shared.k_scales[ring.stage], p.k_scales + slot * SCORE_SCALES, SCORE_SCALES, full);
  ring.advance();
}

// V32 with its scales, or V1, whose exponents are in P'.
__device__ __forceinline__ void fetch_values(const ForwardParams& p, Shared& shared, Ring<V_STAGES>& ring, int64_t slot,
                                             bool diagonal) {
  const uint64_t& full = shared.v_full[ring.stage];
  wait(shared.v_empty[ring.stage], ring.phase ^ 1);
  ptx::mbarrier_arrive_expect_tx(at(&full), diagonal ? VALUE_TILE : VALUE_TILE + SCALES);
  fetch(shared.v[ring.stage], (diagonal ? p.v1 : p.v) + slot * VALUE_TILE, VALUE_TILE, full);
  if (!diagonal) fetch(shared.v_scales[ring.stage], p.v_scales + slot * SCALES, SCALES, full);
  ring.advance();
}

// Note [Order of values]
// ~~~~~~~~~~~~~~~~~~~~~~
// Both query tiles read the same V32, but in causal attention each ends with V1 of its own diagonal tile. Key tile j
// brings, in this order: V1 if it is the diagonal of query tile 0; V32 if it lies before a diagonal; V1 if it is the
// diagonal of query tile 1. The multiplying warp consumes them in the same order.
__device__ __forceinline__ void load(const ForwardParams& p, Shared& shared) {
  Ring<WORK_STAGES> works;
  Ring<K_STAGES> keys;
  Ring<V_STAGES> values;
  uint32_t q_parity[QUERY_TILES] = {0, 0};
  const int items = p.status[layout::NUM_FORWARD];
  for (;; works.advance()) {
    const int taken = atomicAdd(p.ticket, 1);
    wait(shared.work_empty[works.stage], works.phase ^ 1);
    Work work = {};
    if (taken < items) work = describe_item(p, p.items[taken]);
    shared.work[works.stage] = work;
    ptx::mbarrier_arrive(at(&shared.work_full[works.stage]));
    if (work.tiles == 0) break;

    const int count = max(work.keys[0], work.keys[1]);
    for (int j = 0; j < count; ++j) {
      if (j == 0) {
#pragma unroll
        for (int i = 0; i < QUERY_TILES; ++i) {
          if (i == work.tiles) break;
          wait(shared.q_empty[i], q_parity[i] ^ 1);
          q_parity[i] ^= 1;
          fetch_queries(p, shared, work, i);
          if (i == 0) fetch_keys(p, shared, keys, work.key_slot);
        }
      } else {
        fetch_keys(p, shared, keys, int64_t(work.key_slot) + j);
      }
      const bool diagonal[QUERY_TILES] = {p.causal && j == work.keys[0] - 1, p.causal && j == work.keys[1] - 1};
      const bool before = (j < work.keys[0] && !diagonal[0]) || (j < work.keys[1] && !diagonal[1]);
      const int64_t slot = int64_t(work.key_slot) + j;
      if (diagonal[0]) fetch_values(p, shared, values, slot, true);
      if (before) fetch_values(p, shared, values, slot, false);
      if (diagonal[1]) fetch_values(p, shared, values, slot, true);
    }
  }
  if (atomicAdd(p.ticket + 1, 1) == int(gridDim.x) - 1) p.ticket[0] = p.ticket[1] = 0;
}

}  // namespace blackwell
