// dK and dV, and X for dQ: Note [Two products]. A CTA owns 128 keys of one KV head and walks the query tiles that see
// them, head after head of the group, in steps of 64 queries. Everything is transposed, S^T = K Q^T and dP^T = V dO^T, so
// that P^T and X^T are A operands as they come; a consumer warpgroup has 64 of the keys.
//
// dP^T is under way while the second half of P^T is made, dV and S^T of the next step under X^T, dK under the first half
// of the next P^T, half of dV between; the two warpgroups run freely and fill each other's gaps.
#include "common/pairs.cuh"
#include "hopper/backward_fast.cuh"
#include "hopper/backward_rows.cuh"
#include "hopper/backward_slow.cuh"

using namespace backward;

constexpr int STAGES = 3;
constexpr int STAGE_BYTES = 2 * STEP_BYTES + 2 * STEP_WIDE;

struct alignas(1024) Operands {
  uint8_t k[TILE_BYTES];
  uint8_t v[TILE_BYTES];
  struct Stage {
    uint8_t q[STEP_BYTES];
    uint8_t dout[STEP_BYTES];
    uint8_t q_wide[STEP_WIDE];
    uint8_t dout_wide[STEP_WIDE];
  } stage[STAGES];
};

struct Owner {
  KeyColumns keys[2];  // of each half
  Record record;
};

constexpr int PIECE_BYTES = 16 * STEP * 2;                     // of X: 16 keys
constexpr int HALF_BYTES = TILE / 16 * PIECE_BYTES;            // 64 queries
constexpr int64_t PAIR_BYTES = 2 * HALF_BYTES;

struct Shared {
  Operands operands;
  alignas(128) uint8_t x[CONSUMERS / 32][PIECE_BYTES];  // on its way to global memory
  QueryColumns columns[STAGES];
  Owner owner[2];
  Step steps[STAGES];
  uint64_t full[STAGES], empty[STAGES];
  uint64_t k_full, v_full, keys_empty;
  uint64_t owner_full[2], owner_empty[2];
};
static_assert(sizeof(Shared) <= 227 * 1024, "the shared memory of one CTA");
extern "C" __constant__ const int backward_keys_shared_bytes = sizeof(Shared);

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
      return;
    }

    // K's and V's place is free when the owner before is done; two stages are free earlier, and filled first.
    const auto copy_keys = [&]() {
      wait(ptx::shared_address(&s.keys_empty), keys_phase);
      keys_phase ^= 1;
      if (lane != 0) return;
      // Of a causal document's last tile, no query sees an absent half.
      const uint32_t bytes = !causal || r.tile + 1 < r.count || r.rows > STEP ? TILE_BYTES : STEP_BYTES;
      uint32_t barrier = ptx::shared_address(&s.k_full);
      ptx::mbarrier_arrive_expect_tx(barrier, bytes);
      ptx::cp_async_bulk_shared_global(ptx::shared_address(s.operands.k), p.k + k_slot * TILE_BYTES, bytes, barrier);
      barrier = ptx::shared_address(&s.v_full);
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
          ptx::mbarrier_arrive_expect_tx(barrier, STAGE_BYTES + sizeof(QueryColumns));
          copy_step(ptx::shared_address(stage.q), p.q + slot * TILE_BYTES, now.half, barrier);
          ptx::cp_async_bulk_shared_global(ptx::shared_address(&columns),
                                           p.q_columns + (2 * slot + now.half) * sizeof(QueryColumns), sizeof(QueryColumns),
                                           barrier);
          copy_step(ptx::shared_address(stage.dout), p.dout + slot * TILE_BYTES, now.half, barrier);
          copy_step_wide(ptx::shared_address(stage.dout_wide), p.dout_wide + slot * 2 * TILE_BYTES, now.half, barrier);
          copy_step_wide(ptx::shared_address(stage.q_wide), p.q_wide + slot * 2 * TILE_BYTES, now.half, barrier);
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

// ---- consuming -------------------------------------------------------------------------------------------------

// dK or dV of one query head, times `factor`: add the heads before, and store after the last one.
__device__ __forceinline__ void finish(const BackwardParams& p, float (&x)[D / 2], float factor, int g, int part,
                                       const Tokens& out, const Record& r, int row) {
#pragma unroll
  for (int i = 0; i < D / 2; ++i) x[i] = __fmul_rn(factor, x[i]);
  if (p.group > 1) {
    float* const total = p.totals + ((int64_t(blockIdx.x) * 2 + part) * CONSUMERS * (D / 2) + 4 * ptx::thread_index());
    if (g > 0) add_rows(x, total);
    if (g + 1 < p.group) {
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        ptx::st_global_v4(total + i * 4 * CONSUMERS,
                          make_uint4(__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]),
                                     __float_as_uint(x[4 * i + 2]), __float_as_uint(x[4 * i + 3])));
      }
      return;
    }
  }
  store_rows(x, out, r.head, r.start, row, r.rows);
}

__device__ __forceinline__ void consume(const BackwardParams& p, Shared& s) {
  const int warp = uniform(threadIdx.x / 32), group = warp / 4;
  uint32_t lane = threadIdx.x % 32;
  Ring<STAGES> ring;
  float x[32], dp[32], dk[D / 2], dv[D / 2];
  uint32_t a[16], b[16];  // P^T, X^T

  const uint32_t k = ptx::shared_address(s.operands.k) + group * STEP_BYTES;
  const auto wait_full = [&]() { wait(ptx::shared_address(&s.full[ring.stage]), ring.phase); };
  const auto multiply_scores = [&](int stage) {
    forget_all(x);
    ptx::wgmma_fence();
    multiply_channels(x, k, ptx::shared_address(s.operands.stage[0].q), stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
  };
  const auto multiply_values = [&](int stage) {
    forget_all(dp);
    ptx::wgmma_fence();
    multiply_channels(dp, k + TILE_BYTES, ptx::shared_address(s.operands.stage[0].dout), stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
  };
  const auto multiply_p = [&](int half, int stage) {  // of 32 queries
    ptx::wgmma_fence();
    const uint32_t b = ptx::shared_address(s.operands.stage[0].dout_wide);
    multiply_tokens<2>(dv, a + 8 * half, b, stage * sizeof(Operands::Stage) + half * 2 * (16 * MN_STEP));
    ptx::wgmma_commit_group();
  };
  const auto multiply_x = [&](int stage) {
    ptx::wgmma_fence();
    multiply_tokens<4>(dk, b, ptx::shared_address(s.operands.stage[0].q_wide), stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
  };
  const auto release = [&](int stage) {
    ptx::bar_warp_sync();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.empty[stage]));
  };

  // X^T to shared memory, and from there to where the step says.
  const uint32_t piece = ptx::shared_address(s.x[warp]);
  uint32_t at = piece + 128 * (lane % 16) + 16 * (lane / 16 ^ lane % 8);
  const auto put_x = [&](const uint32_t(&x)[16]) {
    ptx::cp_async_bulk_wait_read();
    ptx::bar_warp_sync();
    ptx::keep(at);
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::stmatrix_x4(at ^ 32 * i, x + 4 * i);
  };
  // The end of a step whose products are done.
  const auto send_x_and_release = [&](int stage) {
    ptx::fence_proxy_async();
    ptx::bar_warp_sync();
    if (ptx::thread_index() % 32 == 0) {
      ptx::cp_async_bulk_global_shared(s.steps[stage].x + warp * PIECE_BYTES, piece, PIECE_BYTES);
      ptx::mbarrier_arrive(ptx::shared_address(&s.empty[stage]));
    }
    ptx::cp_async_bulk_commit_group();
  };

#pragma unroll 1
  for (uint32_t n = 0;; ++n) {
    wait(ptx::shared_address(&s.owner_full[n % 2]), n / 2 % 2);
    const Owner& owner = s.owner[n % 2];
    if (!uniform(owner.record.valid)) break;
    const KeyColumns& keys = owner.keys[group];
    const uint32_t of_keys = uniform(keys.flags[0] | keys.flags[1]);
    const auto know = [&](int stage) {
      const uint32_t bits = s.steps[stage].bits;
      return of_keys | uniform(s.columns[stage].flags[0] | s.columns[stage].flags[1] | bits);
    };
    const int rows = uniform(owner.record.rows);
    const bool partial = !p.causal && rows < TILE;
    wait(ptx::shared_address(&s.k_full), n % 2);
#pragma unroll 1
    for (int g = 0; g < p.group; ++g) {
      bool any = true;
      if (p.causal && group == 1) {  // every query of the first step comes before every key of this warpgroup
        wait_full();
        any = !(uniform(s.steps[ring.stage].bits) & ENDS);
        release(ring.stage);
        ring.advance();
      }
      if (any) {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) {
          dk[i] = dv[i] = 0.0f;
          ptx::keep(dk[i]);  // zeros before the first wgmma, and not where the loop begins
          ptx::keep(dv[i]);
        }
        bool started = false;
        wait_full();
        uint32_t now = know(ring.stage);
        multiply_scores(ring.stage);
        wait_in_place(ptx::shared_address(&s.v_full), n % 2);
        ptx::wgmma_wait_group<0>();
        keep_all(x);
#pragma unroll 1
        while (true) {
          const int stage = ring.stage;
          const QueryColumns& columns = s.columns[stage];
          const Hidden hidden{(now & DIAGONAL) != 0, rows};
          const uint32_t phase = ring.phase;
          ring.advance();
          // S of the last step is made twice: no branch has a product, or a wait for operands.
          const int next = now & ENDS ? stage : int(ring.stage);
          const auto wait_next = [&]() {
            wait_in_place(ptx::shared_address(&s.full[next]), now & ENDS ? phase : ring.phase);
          };
          uint32_t then;

          const auto finish_before = [&]() {  // dK of the step before is done
            keep_all(b);
            if (started) send_x_and_release(stage == 0 ? STAGES - 1 : stage - 1);
            started = true;
          };
          if (!(now & SLOW)) {
            // ---- P^T -------------------------------------------------------------------------------------------
            ptx::keep(lane);
            const float4* const score = columns.score + lane % 4;
            if (hidden.diagonal || partial) {
              hide_scores(x, Limits(hidden, At::of_thread(s.steps[stage].half)));
            }
            const float2* const of_key = keys.factors + warp % 4 * 16 + lane / 4;
            const float2 f0 = of_key[0], f1 = of_key[8];
            fast_probabilities<0>(a, x, score, f0.x, f1.x);
            uint32_t held[16];
            copy_all<0, 8>(held, a);
            multiply_p(0, stage);
            ptx::wgmma_wait_group<1>();
            finish_before();
            multiply_values(stage);
            fast_probabilities<1>(a, x, score, f0.x, f1.x);
            copy_all<8, 16>(held, a);
            wait_next();
            multiply_p(1, stage);
            multiply_scores(next);
            then = know(next);
            // ---- X^T -------------------------------------------------------------------------------------------
            ptx::wgmma_wait_group<2>();
            keep_all(dp);
            fast_gradients(b, held, dp, columns.delta + lane % 4, columns.factor, f0.y, f1.y);
          } else {
            ptx::wgmma_wait_group<0>();
            finish_before();
            multiply_values(stage);
            ptx::wgmma_wait_group<0>();
            keep_all(dp);
            const Record& r = owner.record;
            const int64_t q_head = int64_t(r.head) * p.group + g;
            const Meeting m{q_head * p.max_tiles + r.first + s.steps[stage].tile,
                            r.head * p.max_tiles + r.first + r.tile, hidden};
            slow_step(a, b, x, dp, p, m, At::of_thread(s.steps[stage].half));
            wait_next();
            multiply_p(0, stage);
            multiply_p(1, stage);
            ptx::wgmma_wait_group<0>();
            keep_all(a);
            multiply_scores(next);
            then = know(next);
          }
          put_x(b);
          multiply_x(stage);
          ptx::wgmma_wait_group<1>();  // S of the next step; here, not there: else the assembler serializes all products
          keep_all(x);
          keep_all(a);
          if (now & ENDS) break;
          now = then;
        }
        ptx::wgmma_wait_group<0>();
        keep_all(b);
        send_x_and_release(ring.stage == 0 ? STAGES - 1 : ring.stage - 1);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) {
          ptx::keep(dk[i]);
          ptx::keep(dv[i]);
        }
      }
      if (g == p.group - 1 && ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.keys_empty));
      if (any) {
        const Record& r = owner.record;
        const int row = At::of_thread(0).row;
        finish(p, dk, p.softmax_scale, g, 0, p.first, r, row);
        finish(p, dv, 1.0f, g, 1, p.second, r, row);
      }
    }
    ptx::bar_warp_sync();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.owner_empty[n % 2]));
  }
  ptx::cp_async_bulk_wait();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_keys(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&s.full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&s.empty[i]), CONSUMERS / 32);
    }
    ptx::mbarrier_init(ptx::shared_address(&s.k_full), 1);
    ptx::mbarrier_init(ptx::shared_address(&s.v_full), 1);
    ptx::mbarrier_init(ptx::shared_address(&s.keys_empty), CONSUMERS / 32);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&s.owner_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&s.owner_empty[i]), CONSUMERS / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = uniform(threadIdx.x / 32);
  if (warp >= CONSUMERS / 32) {
    ptx::setmaxnreg_dec<24>();
    if (warp == CONSUMERS / 32) fetch(p, s);
  } else {
    ptx::setmaxnreg_inc<240>();
    consume(p, s);
  }
}
