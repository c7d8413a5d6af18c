// The Hopper forward: three producer warps, one that takes work items, inspects them and fetches queries, and two that
// fetch keys and values.
#pragma once

#include "hopper/forward_shared.cuh"

__device__ __forceinline__ void fetch(void* to, const void* from, uint32_t bytes, uint32_t barrier) {
  ptx::cp_async_bulk_shared_global(ptx::shared_address(to), from, bytes, barrier);
}

// A tile of keys, `part` of it: the whole, or the half with tokens (Note [Halves with tokens] of quantize/wide.cuh).
__device__ __forceinline__ void fetch_keys(const ForwardParams& p, Shared& shared, uint32_t stage, uint32_t full,
                                           int64_t at, uint32_t part) {
  constexpr uint32_t FACTOR_BYTES = 4 * hopper::FACTOR_WORDS;
  ptx::mbarrier_arrive_expect_tx(full, TILE_BYTES / part + FACTOR_BYTES);
  fetch(slot(shared, K_SLOT + stage * K_SLOT_STEP), p.k + at * TILE_BYTES, TILE_BYTES / part, full);
  fetch(shared.factors[stage], p.factors + at * hopper::FACTOR_WORDS, FACTOR_BYTES, full);
}

// The same of values. What was there of others stays in the half that is not fetched: finite, and multiplied by P = 0.
__device__ __forceinline__ void fetch_values(const ForwardParams& p, Shared& shared, uint32_t stage, uint32_t full,
                                             int64_t at, uint32_t part) {
  ptx::mbarrier_arrive_expect_tx(full, WIDE_BYTES / part);
#pragma unroll
  for (int i = 0; i < PANELS; ++i) {
    uint8_t* const to = slot(shared, (PANELS - i) * pick(V_DISTANCE, stage));
    fetch(to, p.v + at * WIDE_BYTES + i * hopper::PANEL_BYTES, hopper::PANEL_BYTES / part, full);
  }
}

// Q and its exponents, each half for the warpgroup whose rows they are: both of a tile, or the first ones of two heads.
__device__ __forceinline__ void fetch_queries(const ForwardParams& p, Shared& shared, uint32_t stage) {
  constexpr uint32_t HALF = 64 * WIDTH, EXPONENTS = sizeof(shared.q_exponents[0]);
  const uint32_t full = barrier(ptx::shared_address(&shared), Q_FULL, stage);
  const uint32_t groups = shared.work[stage][1].rows > 64 ? 2 : 1;  // that have rows
  ptx::mbarrier_arrive_expect_tx(full, (TILE_BYTES + EXPONENTS) / GROUPS * groups);
#pragma unroll 1
  for (uint32_t g = 0; g < groups; ++g) {
    const Work& work = shared.work[stage][g];
    const int64_t at = work.head * p.max_tiles + work.tile;
    const int from = 64 * int(g) - work.shift;  // row
#pragma unroll
    for (int i = 0; i < ROW_BYTES / WIDTH; ++i) {
      fetch(slot(shared, Q_SLOT[stage]) + i * hopper::PANEL_BYTES + g * HALF,
            p.q + at * TILE_BYTES + i * hopper::PANEL_BYTES + from * WIDTH, HALF, full);
    }
    fetch(shared.q_exponents[stage] + 64 * g, p.q_exponents + at * layout::TILE + from, EXPONENTS / 2, full);
  }
}

// What the exponents and scales of a query tile and its key tiles say; `work` has what does not depend on them. By one
// warp.
__device__ __forceinline__ void inspect(const ForwardParams& p, Work& work) {
  const int head = work.head, tile = work.tile, first_key = work.first_key, keys = work.keys;
  const int lane = threadIdx.x % 32, seen = p.causal ? keys - 1 : keys;  // tiles whose tokens every row sees
  float largest_q = -127.0f, largest_k = -127.0f;
  bool unusual = p.c_usual == 0;
#pragma unroll
  for (int b = 0; b < layout::BLOCKS; ++b) {
    const float e = p.q_exponents[(head * p.max_tiles + tile) * layout::TILE + layout::BLOCK * b + lane];
    unusual |= E4M3 && fabsf(e) > hopper::USUAL_EXPONENT;
    largest_q = fmaxf(largest_q, e);
  }
  bool lost_k = false, lost_v = false;
  int first_lost_k = layout::TILE, first_lost_v = layout::TILE;
#pragma unroll 1
  for (int j = lane; j < keys; j += 32) {
    const float* const words = p.factors + (int64_t(first_key) + j) * hopper::FACTOR_WORDS + layout::TILE;
    const auto k = *reinterpret_cast<const hopper::KeyTile*>(words);
    unusual |= k.unusual != 0;
    largest_k = fmaxf(largest_k, k.largest_exponent);
    if (j < seen) {
      lost_k |= k.first_lost_k < layout::TILE;
      lost_v |= k.first_lost_v < layout::TILE;
    } else {
      first_lost_k = k.first_lost_k;
      first_lost_v = k.first_lost_v;
    }
  }
  const auto largest = [](float x) { return int(ptx::redux_max_u32(uint32_t(int(x) + 127))) - 127; };
  const int bound = MAX_SCORE_EXPONENT + largest(largest_q) + largest(largest_k) + p.c_exponent;
  const bool slow = ptx::vote_any(unusual) || bound > 21;
  const int lost = (ptx::vote_any(lost_k) ? 1 : 0) | (ptx::vote_any(lost_v) ? 2 : 0);
  if (lane == (keys - 1) % 32) {  // the one that has seen the diagonal tile
    work.slow = slow;
    work.lost = lost;
    work.first_lost_k = first_lost_k + work.shift;
    work.first_lost_v = first_lost_v + work.shift;
  }
}

// Takes items and publishes the query tiles in them; at the end, one of no keys. By one warp.
__device__ __forceinline__ void take_items(const ForwardParams& p, Shared& shared) {
  const int lane = threadIdx.x % 32;
  const uint32_t address = ptx::shared_address(&shared);
  WorkRing ring;
  const auto publish = [&](int heads) {  // what was found, for both warpgroups the same unless it is two heads
    constexpr int WORDS = sizeof(Work) / 4;
    static_assert(GROUPS * WORDS <= 32, "a word for each lane");
    hopper::wait(barrier(address, WORK_EMPTY, ring.stage), ring.phase ^ 1);
    ptx::bar_warp_sync();
    if (lane < GROUPS * WORDS) {
      const int from = heads == 2 ? lane : lane % WORDS;
      reinterpret_cast<int*>(shared.work[ring.stage])[lane] = reinterpret_cast<const int*>(shared.found)[from];
    }
    ptx::bar_warp_sync();
    if (ptx::arrives(lane)) ptx::mbarrier_arrive(barrier(address, WORK_FULL, ring.stage));
    if (lane == 0) {
      if (heads > 0) {
        hopper::wait(barrier(address, Q_EMPTY, ring.stage), ring.phase ^ 1);
        fetch_queries(p, shared, ring.stage);
      }
    }
    ptx::bar_warp_sync();
    ring.advance();
  };
  for (;;) {
    int taken = 0;
    if (lane == 0) taken = atomicAdd(p.ticket, 1);
    taken = int(ptx::shfl_idx(taken, 0));
    if (taken >= p.status[layout::NUM_FORWARD]) break;
    const int4 item = p.items[taken];
    const int base = p.tile_offsets[item.x], count = p.tile_offsets[item.x + 1] - base;
    const int last = min(item.z + 2, count);
    for (int index = item.z; index < last; ++index) {
      const layout::Tile tile = p.tiles[base + index];
      const int heads = (item.y ^ 1) < p.q_heads && tile.rows <= 64 ? 2 : 1;
      if (heads == 2 && item.y % 2 == 1) continue;  // whoever takes the head before does this one too
      if (lane < heads) {
        Work& work = shared.found[lane];
        work.keys = p.causal ? index + 1 : count;
        work.head = item.y + lane;
        work.tile = base + index;
        work.first_key = work.head / p.group * int(p.max_tiles) + base;
        work.heads = heads;
        work.shift = 64 * lane;
        work.start = tile.start - work.shift;
        work.rows = tile.rows + work.shift;
      }
      ptx::bar_warp_sync();
#pragma unroll 1
      for (int g = 0; g < heads; ++g) inspect(p, shared.found[g]);
      publish(heads);
    }
  }
  if (lane == 0) shared.found[0] = {};
  publish(0);
  if (lane == 0 && atomicAdd(p.ticket + 1, 1) == int(gridDim.x) - 1) p.ticket[0] = p.ticket[1] = 0;
}

// Fetches the keys of what was published, or its values. By one thread each.
template <bool VALUES>
__device__ __forceinline__ void fetch_items(const ForwardParams& p, Shared& shared) {
  const uint32_t address = ptx::shared_address(&shared);
  WorkRing ring;
  KvRing kv;
  for (;; ring.advance()) {
    hopper::wait(barrier(address, WORK_FULL, ring.stage), ring.phase);
    const Work& work = shared.work[ring.stage][0];
    const int keys = work.keys, tiles = keys * work.heads;
    if (keys == 0) break;
    const bool half = E4M3 && p.causal && work.rows <= 64;  // of the last key tile
    for (int i = 0; i < tiles; ++i, kv.advance()) {
      const int head = tiles > keys ? i % 2 : 0, j = tiles > keys ? i / 2 : i;
      const int64_t at = shared.work[ring.stage][head].first_key + j;
      const uint32_t part = half && j == keys - 1 ? 2 : 1;
      hopper::wait(barrier(address, VALUES ? V_EMPTY : K_EMPTY, kv.stage), kv.phase ^ 1);
      const uint32_t full = barrier(address, VALUES ? V_FULL : K_FULL, kv.stage);
      if constexpr (VALUES) {
        fetch_values(p, shared, kv.stage, full, at, part);
      } else {
        fetch_keys(p, shared, kv.stage, full, at, part);
      }
    }
    ptx::mbarrier_arrive(barrier(address, WORK_EMPTY, ring.stage));
  }
}
