// The Hopper forward: two producer warps, one that takes work items and inspects them, one that fetches their tiles.
#pragma once

#include "hopper/forward_shared.cuh"

__device__ __forceinline__ void fetch(void* to, const void* from, uint32_t bytes, uint32_t barrier) {
  ptx::cp_async_bulk_shared_global(ptx::shared_address(to), from, bytes, barrier);
}

// The keys and values of one query tile, the last one its diagonal tile if causal.
__device__ __forceinline__ void fetch_keys(const ForwardParams& p, Shared& shared, KvRing& ring, int64_t first,
                                           int keys) {
  const uint32_t address = ptx::shared_address(&shared);
  for (int j = 0; j < keys; ++j, ring.advance()) {
    const int64_t at = first + j;
    const uint32_t stage = ring.stage, k_full = barrier(address, K_FULL, stage);
    const uint32_t v_full = barrier(address, V_FULL, stage);
    hopper::wait(barrier(address, K_EMPTY, stage), ring.phase ^ 1);
    constexpr uint32_t FACTOR_BYTES = 4 * hopper::FACTOR_WORDS;
    ptx::mbarrier_arrive_expect_tx(k_full, TILE_BYTES + FACTOR_BYTES);
    fetch(slot(shared, K_SLOT + stage * K_SLOT_STEP), p.k + at * TILE_BYTES, TILE_BYTES, k_full);
    fetch(shared.factors[stage], p.factors + at * hopper::FACTOR_WORDS, FACTOR_BYTES, k_full);

    hopper::wait(barrier(address, V_EMPTY, stage), ring.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(v_full, WIDE_BYTES);
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      uint8_t* const to = slot(shared, (PANELS - i) * pick(V_DISTANCE, stage));
      fetch(to, p.v + at * WIDE_BYTES + i * hopper::PANEL_BYTES, hopper::PANEL_BYTES, v_full);
    }
  }
}

// What the exponents and scales of a query tile and its key tiles say. By one warp.
__device__ __forceinline__ Work inspect(const ForwardParams& p, int head, int tile, int64_t first_key, int keys) {
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
    const float* const words = p.factors + (first_key + j) * hopper::FACTOR_WORDS + layout::TILE;
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
  const layout::Tile found = p.tiles[tile];
  const int bound = MAX_SCORE_EXPONENT + largest(largest_q) + largest(largest_k) + p.c_exponent;
  return {keys,
          head,
          tile,
          found.start,
          found.rows,
          ptx::vote_any(unusual) || bound > 21,
          (ptx::vote_any(lost_k) ? 1 : 0) | (ptx::vote_any(lost_v) ? 2 : 0),
          int(ptx::shfl_idx(first_lost_k, (keys - 1) % 32)),
          int(ptx::shfl_idx(first_lost_v, (keys - 1) % 32)),
          int32_t(first_key)};
}

// Takes items and publishes the query tiles in them; at the end, one of no keys. By one warp.
__device__ __forceinline__ void take_items(const ForwardParams& p, Shared& shared) {
  const bool leader = threadIdx.x % 32 == 0;
  const uint32_t address = ptx::shared_address(&shared);
  WorkRing ring;
  const auto publish = [&](const Work& work) {
    if (leader) {
      hopper::wait(barrier(address, WORK_EMPTY, ring.stage), ring.phase ^ 1);
      shared.work[ring.stage] = work;
      ptx::mbarrier_arrive(barrier(address, WORK_FULL, ring.stage));
    }
    ring.advance();
    ptx::bar_warp_sync();
  };
  const int items = p.status[layout::NUM_FORWARD];
  for (;;) {
    int taken = 0;
    if (leader) taken = atomicAdd(p.ticket, 1);
    taken = int(ptx::shfl_idx(taken, 0));
    if (taken >= items) break;
    const int4 item = p.items[taken];
    const int base = p.tile_offsets[item.x], count = p.tile_offsets[item.x + 1] - base;
    const int head = item.y, last = min(item.z + 2, count);
    const int64_t first_key = head / p.group * p.max_tiles + base;
    for (int index = item.z; index < last; ++index) {
      publish(inspect(p, head, base + index, first_key, p.causal ? index + 1 : count));
    }
  }
  publish({});
  if (leader && atomicAdd(p.ticket + 1, 1) == int(gridDim.x) - 1) p.ticket[0] = p.ticket[1] = 0;
}

// By one thread.
__device__ __forceinline__ void fetch_items(const ForwardParams& p, Shared& shared) {
  const uint32_t address = ptx::shared_address(&shared);
  WorkRing ring;
  KvRing kv;
  for (;; ring.advance()) {
    const uint32_t stage = ring.stage;
    hopper::wait(barrier(address, WORK_FULL, stage), ring.phase);
    const Work work = shared.work[stage];
    if (work.keys == 0) break;
    const uint32_t full = barrier(address, Q_FULL, stage);
    hopper::wait(barrier(address, Q_EMPTY, stage), ring.phase ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, TILE_BYTES + sizeof(shared.q_exponents[0]));
    const int64_t at = work.head * p.max_tiles + work.tile;
    fetch(slot(shared, Q_SLOT[stage]), p.q + at * TILE_BYTES, TILE_BYTES, full);
    fetch(shared.q_exponents[stage], p.q_exponents + at * layout::TILE, sizeof(shared.q_exponents[0]), full);
    fetch_keys(p, shared, kv, work.first_key, work.keys);
    ptx::mbarrier_arrive(barrier(address, WORK_EMPTY, ring.stage));
  }
}
