// Operands of `backward_keys`: one warp fetches them, and three more make wide copies where WIDENS says so.
#pragma once

#include "common/pairs.cuh"
#include "hopper/backward_shared.cuh"
#include "hopper/backward_wide.cuh"

namespace backward {

// The steps of an owner and one query head: query tiles and halves of them, ascending.
struct Steps {
  int tile, half = 0;
  __device__ __forceinline__ Steps(const Record& r, bool causal) : tile(causal ? r.tile : 0) {}
  // Advance; false past the end.
  __device__ __forceinline__ bool advance(const Record& r) {
    if (half == 0 && !(tile == r.count - 1 && r.last <= STEP)) {
      half = 1;
      return true;
    }
    half = 0;
    return ++tile < r.count;
  }
};

// ---- fetching --------------------------------------------------------------------------------------------------

// A step that is none, behind the last.
__device__ __forceinline__ void stop_wideners(Shared& s, const Ring<STAGES>& ring) {
  wait(ptx::shared_address(&s.empty[ring.stage]), ring.phase ^ 1);
  if (threadIdx.x % 32 != 0) return;
  s.steps[ring.stage].bits = STOPS;
  ptx::mbarrier_arrive(ptx::shared_address(&s.full[ring.stage]));
}

// One warp: items, the owner's operands, and the operands of every step.
__device__ __forceinline__ void fetch(const BackwardParams& p, Shared& s) {
  const int lane = threadIdx.x % 32;
  const bool causal = p.causal;
  Ring<STAGES> ring;
  Ring<2> owners;
  uint32_t keys_phase = 1;
#pragma unroll 1
  while (true) {
    int item = 0;
    if (lane == 0) item = atomicAdd(p.ticket, 1);
    item = ptx::shfl_idx(item, 0);
    Record r{};
    int64_t first_pair = 0;
    r.valid = item < p.status[layout::NUM_BACKWARD];
    if (r.valid) {
      const int4 found = p.items[item];
      if (found.y < p.first_head || found.y >= p.last_head) continue;
      r.head = found.y, r.tile = found.z;
      r.first = p.tile_offsets[found.x], r.count = p.tile_offsets[found.x + 1] - r.first;
      const layout::Tile tile = p.tiles[r.first + r.tile];
      r.rows = tile.rows, r.start = tile.start;
      r.last = p.tiles[r.first + r.count - 1].rows;
      first_pair = layout::first_pair(causal, p.longest, found.x, r.start - r.tile * TILE);
    }
    const int64_t k_slot = r.head * p.max_tiles + r.first + r.tile;
    Owner& owner = s.owner[owners.stage];
    wait(ptx::shared_address(&s.owner_empty[owners.stage]), owners.phase ^ 1);
    if (lane == 0) {
      const uint32_t barrier = ptx::shared_address(&s.owner_full[owners.stage]);
      owner.record = r;
      ptx::mbarrier_arrive_expect_tx(barrier, r.valid ? sizeof(owner.keys) : 0);
      if (r.valid) {
        ptx::cp_async_bulk_shared_global(ptx::shared_address(owner.keys), p.k_columns + k_slot * sizeof(owner.keys),
                                         sizeof(owner.keys), barrier);
      }
    }
    owners.advance();
    if (!r.valid) {
      if (lane == 0 && atomicAdd(p.ticket + 1, 1) == int(gridDim.x) - 1) p.ticket[0] = p.ticket[1] = 0;
      if constexpr (WIDENING) stop_wideners(s, ring);
      return;
    }

    // K's and V's place is free when the owner before is done; two stages are free earlier, and filled first.
    const auto copy_keys = [&]() {
      wait(ptx::shared_address(s.keys_empty), keys_phase);
      keys_phase ^= 1;
      if (lane != 0) return;
      // Of a causal document's last tile, no query sees an absent half, which codes have in one piece.
      const uint32_t bytes = !E4M3 || !causal || r.tile + 1 < r.count || r.rows > STEP ? TILE_BYTES : STEP_BYTES;
      uint32_t barrier = ptx::shared_address(s.k_full);
      ptx::mbarrier_arrive_expect_tx(barrier, bytes);
      ptx::cp_async_bulk_shared_global(ptx::shared_address(s.operands.k), p.k + k_slot * TILE_BYTES, bytes, barrier);
      barrier = ptx::shared_address(s.v_full);
      ptx::mbarrier_arrive_expect_tx(barrier, bytes);
      ptx::cp_async_bulk_shared_global(ptx::shared_address(s.operands.v), p.v + k_slot * TILE_BYTES, bytes, barrier);
    };
    int ahead = 2;
#pragma unroll 1
    for (int g = 0; g < p.group; ++g) {
      Steps step(r, causal);
      bool more = true;
      while (more) {
        const bool diagonal = causal && step.tile == r.tile;
        const Steps now = step;
        const int64_t slot = (int64_t(r.head) * p.group + g) * p.max_tiles + r.first + now.tile;
        more = step.advance(r);
        wait(ptx::shared_address(&s.empty[ring.stage]), ring.phase ^ 1);
        if (lane == 0) {
          Operands::Stage& stage = s.operands.stage[ring.stage];
          QueryColumns& columns = s.columns[ring.stage];
          const uint32_t barrier = ptx::shared_address(&s.full[ring.stage]);
          const int64_t pair = layout::pair_of(causal, first_pair, r.count, now.tile, r.tile);
          uint8_t* const x = p.x + ((int64_t(r.head - p.first_head) * p.group + g) * p.pairs + pair) * PAIR_BYTES;
          s.steps[ring.stage] = {x + now.half * HALF_BYTES, now.tile, now.half,
                                 (diagonal ? DIAGONAL : 0u) | (more ? 0u : ENDS)};
          constexpr int WIDE = WIDENING ? STEP * sizeof(float) : COPIED ? 2 * STEP_WIDE : 0;
          ptx::mbarrier_arrive_expect_tx(barrier, 2 * STEP_BYTES + WIDE + sizeof(QueryColumns));
          copy_step<ROW_BYTES>(ptx::shared_address(stage.q), p.q + slot * TILE_BYTES, now.half, barrier);
          ptx::cp_async_bulk_shared_global(ptx::shared_address(&columns),
                                           p.q_columns + (2 * slot + now.half) * sizeof(QueryColumns), sizeof(QueryColumns),
                                           barrier);
          copy_step<ROW_BYTES>(ptx::shared_address(stage.dout), p.dout + slot * TILE_BYTES, now.half, barrier);
          if constexpr (WIDENING) {
            ptx::cp_async_bulk_shared_global(ptx::shared_address(s.exponents[ring.stage]),
                                             p.q_exponents + slot * TILE + now.half * STEP, WIDE, barrier);
          } else if constexpr (COPIED) {
            copy_step<2 * D>(ptx::shared_address(stage.dout_wide), p.dout_wide + slot * 2 * TILE_BYTES, now.half, barrier);
            copy_step<2 * D>(ptx::shared_address(stage.q_wide), p.q_wide + slot * 2 * TILE_BYTES, now.half, barrier);
          }
        }
        ring.advance();
        if (ahead > 0 && (--ahead == 0 || !more)) {
          copy_keys();
          ahead = 0;
        }
      }
    }
  }
}

// ---- widening --------------------------------------------------------------------------------------------------

// The wide copy of 64 rows of codes, by WIDENERS warps, 8 rows at a time, from rows 8 `first` of the first warp on;
// `power_of` gives the power of two of a row. A lane takes 16 codes of each panel; lanes of odd rows start with the last
// panel, so that eight lanes read from different banks.
template <bool FAST, class PowerOf>
__device__ __forceinline__ void widen_rows(uint32_t codes, uint32_t wide, uint32_t first, PowerOf power_of) {
  const uint32_t warp = threadIdx.x / 32 - CONSUMERS / 32 - 1, lane = threadIdx.x % 32, piece = lane % 4;
  uint32_t row = (warp + first) % WIDENERS * 8 + lane / 4;
  codes += layout::payload_offset<D>(row, 16 * piece) ^ 64 * (row % PANELS);
  wide += row % PANELS * STEP_PANEL + 128 * row + 16 * (2 * piece ^ row % 8);
#pragma unroll 1
  for (; row < STEP; row += 8 * WIDENERS, codes += 8 * WIDENERS * D, wide += 8 * WIDENERS * 128) {
    const uint32_t power = power_of(row);
#pragma unroll
    for (int i = 0; i < PANELS; ++i) {
      const uint4 word = ptx::ld_shared_v4(codes ^ 64 * i);
      const uint32_t to = i == 0 ? wide : row % 2 == 0 ? wide + STEP_PANEL : wide - STEP_PANEL;
      ptx::st_shared_v4(to, widen_piece<FAST>(word.x, word.y, power));
      ptx::st_shared_v4(to ^ 16, widen_piece<FAST>(word.z, word.w, power));
    }
  }
}

template <bool FAST>
__device__ __forceinline__ void widen_dout(Operands::Stage& to, const QueryColumns& columns) {
  widen_rows<FAST>(ptx::shared_address(to.dout), ptx::shared_address(to.dout_wide), 0,
                   [&](uint32_t row) { return pair_power<FAST>(columns.factor[row / 32]); });
}

template <bool FAST>
__device__ __forceinline__ void widen_q(Operands::Stage& to, const float (&exponents)[STEP]) {
  widen_rows<FAST>(ptx::shared_address(to.q), ptx::shared_address(to.q_wide), 1,
                   [&](uint32_t row) { return pair_exp2<FAST>(exponents[row]); });
}

// The three warps beside the fetching one: dO', then q of every step.
__device__ __forceinline__ void widen(Shared& s) {
  Ring<STAGES> ring;
#pragma unroll 1
  while (true) {
    wait(ptx::shared_address(&s.full[ring.stage]), ring.phase);
    if (uniform(s.steps[ring.stage].bits) & STOPS) return;
    Operands::Stage& stage = s.operands.stage[ring.stage];
    const QueryColumns& columns = s.columns[ring.stage];
    const bool slow = uniform(columns.flags[0] | columns.flags[1]) & SLOW;
    const auto publish = [](uint64_t& barrier) {
      ptx::fence_proxy_async();
      ptx::bar_warp_sync();
      if (ptx::arrives(threadIdx.x % 32)) ptx::mbarrier_arrive(ptx::shared_address(&barrier));
    };
    if (slow || uniform(fmaxf(columns.factor[0], columns.factor[1]) > LARGEST_POWER)) {
      widen_dout<false>(stage, columns);
    } else {
      widen_dout<true>(stage, columns);
    }
    publish(s.dout_widened[ring.stage]);
    if (slow) {
      widen_q<false>(stage, s.exponents[ring.stage]);
    } else {
      widen_q<true>(stage, s.exponents[ring.stage]);
    }
    publish(s.q_widened[ring.stage]);
    ring.advance();
  }
}

}  // namespace backward
