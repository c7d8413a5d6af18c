// dK and dV: Note [Two owners]. A CTA owns 128 keys of one KV head and walks the query tiles that see them, head after
// head of the group, in steps of 64 queries. Everything is transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and X^T
// are A operands as they come; a consumer warpgroup has 64 of the keys.
//
// dP^T is under way while the second half of P^T is made, dV and S^T of the next step while X^T is rounded, dK while that
// S^T is scaled; the two warpgroups run freely and fill each other's gaps. Where the products are issued was measured: dV
// under X^T, or dP^T earlier, is slower.
#include "hopper/backward_rows.cuh"
#include "hopper/backward_slow.cuh"

using namespace backward;

constexpr int STAGES = 3;
constexpr int STAGE_BYTES = 2 * STEP_BYTES + 2 * STEP_WIDE;

struct alignas(1024) Operands {
  uint8_t k[TILE_BYTES];
  uint8_t v[TILE_BYTES];
  uint8_t v1[TILE_BYTES];
  struct Stage {
    uint8_t q[STEP_BYTES];
    uint8_t dout[STEP_BYTES];
    uint8_t q_wide[STEP_WIDE];
    uint8_t dout_wide[STEP_WIDE];
  } stage[STAGES];
};

struct Owner {
  KeyColumns keys[2][2];  // of each half, with V and with V1
  Record record;
};

struct Shared {
  Operands operands;
  QueryColumns columns[STAGES];
  Owner owner[2];
  Step steps[STAGES];
  Exchange exchange;
  uint64_t full[STAGES], empty[STAGES];
  uint64_t keys_full, keys_empty;
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
    Owner& owner = s.owner[owners.stage];
    wait(ptx::shared_address(&s.owner_empty[owners.stage]), owners.phase ^ 1);
    Record r{};
    r.valid = item < p.status[layout::NUM_BACKWARD];
    if (r.valid) {
      const int4 found = p.items[item];
      r.head = found.y, r.tile = found.z;
      r.first = p.tile_offsets[found.x], r.count = p.tile_offsets[found.x + 1] - r.first;
      const layout::Tile tile = p.tiles[r.first + r.tile];
      r.rows = tile.rows, r.start = tile.start;
      r.last = p.tiles[r.first + r.count - 1].rows;
    }
    const int64_t k_slot = r.head * p.max_tiles + r.first + r.tile;
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

    wait(ptx::shared_address(&s.keys_empty), keys_phase);
    keys_phase ^= 1;
    if (lane == 0) {
      const uint32_t barrier = ptx::shared_address(&s.keys_full);
      ptx::mbarrier_arrive_expect_tx(barrier, (causal ? 3 : 2) * TILE_BYTES);
      ptx::cp_async_bulk_shared_global(ptx::shared_address(s.operands.k), p.k + k_slot * TILE_BYTES, TILE_BYTES, barrier);
      ptx::cp_async_bulk_shared_global(ptx::shared_address(s.operands.v), p.v + k_slot * TILE_BYTES, TILE_BYTES, barrier);
      if (causal) {
        ptx::cp_async_bulk_shared_global(ptx::shared_address(s.operands.v1), p.v1 + k_slot * TILE_BYTES, TILE_BYTES,
                                         barrier);
      }
    }
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
          s.steps[ring.stage] = {now.tile, now.half, (diagonal ? DIAGONAL : 0u) | (more ? 0u : ENDS)};
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
      }
    }
  }
}

// ---- a step ----------------------------------------------------------------------------------------------------

// Element i of the accumulator: key `row` + 8 (i / 2 % 2) of the tile, query `first` + 8 (i / 4) + i % 2.
struct At {
  int row;
  int first;
  __device__ __forceinline__ static At of_thread(int half) {
    const int thread = ptx::thread_index();
    return {thread / 32 * 16 + thread % 32 / 4, STEP * half + 2 * (thread % 4)};
  }
  __device__ __forceinline__ Place operator()(int i) const { return {first + 8 * (i / 4) + i % 2, row + 8 * (i / 2 % 2)}; }
};

// Hidden entries of a thread: element i is one if limit[i / 2 % 2] > 8 (i / 4) + i % 2.
struct Limits {
  int limit[2];
  __device__ __forceinline__ Limits(const Hidden& hidden, const At& at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.row + 8 * h;
      limit[h] = hidden.diagonal ? row - at.first : row < hidden.rows ? -1 : TILE;
    }
  }
  __device__ __forceinline__ bool operator()(int i) const { return limit[i / 2 % 2] > 8 * (i / 4) + i % 2; }
};

// S^T times the keys' factors in place, of one tile of 32 queries; the largest t of the thread's entries, rounded up, or 0.
template <int TILE_OF_STEP>
__device__ __forceinline__ float scale_scores(float (&x)[32], const float4* score, float k0, float k1) {
  float top = 0.0f;
#pragma unroll
  for (int n = 4 * TILE_OF_STEP; n < 4 * TILE_OF_STEP + 4; ++n) {
    const float4 c = score[4 * n];
#pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; ++i) x[i] = __fmul_rn(x[i], i % 4 < 2 ? k0 : k1);
    const float low = __fmaf_ru(fmaxf(x[4 * n], x[4 * n + 2]), c.z, c.x);
    const float high = __fmaf_ru(fmaxf(x[4 * n + 1], x[4 * n + 3]), c.w, c.y);
    top = fmaxf(top, fmaxf(low, high));
  }
  return top;
}

// P^T from scaled scores of one tile: packed, and in place.
template <int TILE_OF_STEP>
__device__ __forceinline__ void fast_probabilities(uint32_t (&a)[16], float (&x)[32], const float4* score, uint32_t top) {
  const int shift = 8 - int(top);
  const uint32_t scale = scale_of_codes(top);
#pragma unroll
  for (int n = 4 * TILE_OF_STEP; n < 4 * TILE_OF_STEP + 4; ++n) {
    const float4 c = score[4 * n];
#pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; i += 2) {
      const float low = probability(x[i], c.z, c.x, shift), high = probability(x[i + 1], c.w, c.y, shift);
      a[i / 2] = pack_codes(low, high, scale);
      x[i] = unpack(a, i);
      x[i + 1] = unpack(a, i + 1);
    }
  }
}

// X^T from P^T in the place of dP^T, of one tile, not yet rounded; the largest magnitude of the thread's entries. k0
// and k1: 2^eK of the rows, v0 and v1: 2^e of V.
template <int TILE_OF_STEP>
__device__ __forceinline__ float fast_gradients(const float (&x)[32], float (&dp)[32], const float4* gradient, float of_dout,
                                                float k0, float k1, float v0, float v1) {
  const float f0 = __fmul_rn(v0, of_dout), f1 = __fmul_rn(v1, of_dout);
  float amax = 0.0f;
#pragma unroll
  for (int n = 4 * TILE_OF_STEP; n < 4 * TILE_OF_STEP + 4; ++n) {
    const float4 c = gradient[4 * n];
#pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; ++i) {
      const float d = __fmaf_rn(dp[i], i % 4 < 2 ? f0 : f1, i % 2 == 0 ? c.x : c.y);
      dp[i] = __fmul_rn(__fmul_rn(__fmul_rn(x[i], d), i % 2 == 0 ? c.z : c.w), i % 4 < 2 ? k0 : k1);
      amax = fmaxf(amax, fabsf(dp[i]));
    }
  }
  return amax;
}

// -inf in hidden scores.
__device__ __forceinline__ void hide_scores(float (&x)[32], const Limits& limits) {
#pragma unroll
  for (int i = 0; i < 32; ++i) x[i] = limits(i) ? -infinity() : x[i];
}

// Zeros in hidden gradients of one tile; the largest magnitude of the others.
template <int TILE_OF_STEP>
__device__ __forceinline__ float hide_gradients(float (&x)[32], const Limits& limits) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 16 * TILE_OF_STEP; i < 16 * TILE_OF_STEP + 16; ++i) {
    x[i] = limits(i) ? 0.0f : x[i];
    largest = fmaxf(largest, fabsf(x[i]));
  }
  return largest;
}

template <int TILE_OF_STEP>
__device__ __forceinline__ void round_gradients(float (&x)[32], uint32_t amax) {
  const float least = least_gradient(amax);
#pragma unroll
  for (int i = 16 * TILE_OF_STEP; i < 16 * TILE_OF_STEP + 16; ++i) x[i] = round_scaled(x[i], least);
}

// ---- consuming -------------------------------------------------------------------------------------------------

// dK or dV of one query head: undo `factor` on the rows, add the heads before, and store after the last one.
__device__ __forceinline__ void finish(const BackwardParams& p, float (&x)[D / 2], float factor0, float factor1, int g,
                                       int part, const Tokens& out, const Record& r, int row) {
#pragma unroll
  for (int i = 0; i < D / 2; ++i) x[i] = __fmul_rn(x[i], i % 4 < 2 ? factor0 : factor1);
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
  uint32_t phases = 0;  // bit 0 of the exchange of E, bit 1 of that of amax
  float x[32], dp[32], dk[D / 2], dv[D / 2];
  uint32_t a[16];

  const uint32_t k = ptx::shared_address(s.operands.k) + group * STEP_BYTES;
  const auto wait_full = [&]() { wait(ptx::shared_address(&s.full[ring.stage]), ring.phase); };
  const auto multiply_scores = [&](int stage) {
    forget_all(x);
    ptx::wgmma_fence();
    multiply_channels(x, k, ptx::shared_address(s.operands.stage[0].q), stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
  };
  const auto multiply_values = [&](int stage, bool diagonal) {
    forget_all(dp);
    ptx::wgmma_fence();
    multiply_channels(dp, k + (diagonal ? 2 : 1) * TILE_BYTES, ptx::shared_address(s.operands.stage[0].dout),
                      stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
  };
  const auto multiply_p = [&](int stage) {
    ptx::wgmma_fence();
    multiply_tokens(dv, a, ptx::shared_address(s.operands.stage[0].dout_wide), stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
  };
  const auto multiply_x = [&](int stage) {
    ptx::wgmma_fence();
    multiply_tokens(dk, a, ptx::shared_address(s.operands.stage[0].q_wide), stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
  };
  const auto release = [&](int stage) {
    ptx::bar_warp_sync();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.empty[stage]));
  };

#pragma unroll 1
  for (uint32_t n = 0;; ++n) {
    wait(ptx::shared_address(&s.owner_full[n % 2]), n / 2 % 2);
    const Owner& owner = s.owner[n % 2];
    if (!uniform(owner.record.valid)) return;
    RowFlags rows(p, owner.keys[group][0].summary);
    rows.flags |= owner.keys[group][1].summary.flags[0] | owner.keys[group][1].summary.flags[1];  // of V1
    const auto know = [&](int stage) { return flags_of(rows, s.columns[stage].summary, s.steps[stage]); };
    wait(ptx::shared_address(&s.keys_full), n % 2);
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
#pragma unroll 1
        while (true) {
          const int stage = ring.stage;
          const QueryColumns& columns = s.columns[stage];
          const Hidden hidden{(now & DIAGONAL) != 0, int(uniform(owner.record.rows))};
          const bool masked = hidden.diagonal || (!p.causal && hidden.rows < TILE);
          ring.advance();
          const int next = now & ENDS ? stage : int(ring.stage);  // S of the last step is made twice: no branch has one
          bool summed = false, done = false;  // dV; all
          uint32_t then = now;

          ptx::wgmma_wait_group<0>();
          keep_all(x);
          keep_all(a);
          if (started) release(stage == 0 ? STAGES - 1 : stage - 1);  // dK of the step before is done
          started = true;
          if (!(now & SLOW)) {
            // ---- P^T -------------------------------------------------------------------------------------------
            ptx::keep(lane);
            const float4* const score = columns.score + lane % 4;
            if (masked) hide_scores(x, Limits(hidden, At::of_thread(s.steps[stage].half)));
            const int key = warp % 4 * 16 + lane / 4;  // the thread's other one is 8 further
            const float* const at_key =
                reinterpret_cast<const float*>(owner.keys[group][hidden.diagonal].score + key / 2) + key % 2;
            const float k0 = at_key[0], k1 = at_key[16];
            s.exchange.send(E_FIRST, warp, __float_as_uint(scale_scores<0>(x, score, k0, k1)));
            s.exchange.send(E_SECOND, warp, __float_as_uint(scale_scores<1>(x, score, k0, k1)));
            const uint2 first = s.exchange.receive(E_FIRST, warp, phases & 1);
            fast_probabilities<0>(a, x, score, known_top(first.x));
            const uint2 second = s.exchange.receive(E_SECOND, warp, phases & 1);
            multiply_values(stage, hidden.diagonal);
            fast_probabilities<1>(a, x, score, known_top(second.x));
            phases ^= 1;
            ptx::wgmma_wait_group<0>();
            keep_all(dp);
            if (!uniform(is_low(first, second))) {
              // ---- X^T -----------------------------------------------------------------------------------------
              ptx::keep(lane);
              const float4* const gradient = columns.gradient + lane % 4;
              const float v0 = at_key[2], v1 = at_key[18];
              float largest = fast_gradients<0>(x, dp, gradient, columns.summary.factor[0], k0, k1, v0, v1);
              if (masked) largest = hide_gradients<0>(dp, Limits(hidden, At::of_thread(s.steps[stage].half)));
              s.exchange.send(AMAX_FIRST, warp, __float_as_uint(largest));
              largest = fast_gradients<1>(x, dp, gradient, columns.summary.factor[1], k0, k1, v0, v1);
              if (masked) largest = hide_gradients<1>(dp, Limits(hidden, At::of_thread(s.steps[stage].half)));
              s.exchange.send(AMAX_SECOND, warp, __float_as_uint(largest));
              if (!(now & ENDS)) wait_full();
              multiply_p(stage);
              summed = true;
              multiply_scores(next);
              then = know(next);
              const uint2 amax0 = s.exchange.receive(AMAX_FIRST, warp, phases >> 1);
              round_gradients<0>(dp, amax0.x);
              const uint2 amax1 = s.exchange.receive(AMAX_SECOND, warp, phases >> 1);
              round_gradients<1>(dp, amax1.x);
              phases ^= 2;
              if (!uniform(is_unusual(amax0, amax1, now & TINY))) {
                ptx::wgmma_wait_group<1>();
                keep_all(a);
                done = true;
              }
            }
          }
          if (!done) {
            ptx::wgmma_wait_group<0>();
            multiply_scores(stage);
            multiply_values(stage, now & DIAGONAL);
            ptx::wgmma_wait_group<0>();
            keep_all(x);
            keep_all(dp);
            const Record& r = owner.record;
            const int64_t q_head = int64_t(r.head) * p.group + g;
            const Meeting m{q_head * p.max_tiles + r.first + s.steps[stage].tile,
                            r.head * p.max_tiles + r.first + r.tile, hidden};
            slow_probabilities(x, p, m, s.exchange, At::of_thread(s.steps[stage].half));
            pack(a, x);
            if (!summed) {
              multiply_p(stage);
              ptx::wgmma_wait_group<0>();
              keep_all(a);
            }
            slow_gradients(dp, p, m, s.exchange, At::of_thread(s.steps[stage].half));
            if (!(now & ENDS)) wait_full();
            then = know(next);
            multiply_scores(next);
          }
          pack(a, dp);
          multiply_x(stage);
          if (now & ENDS) break;
          now = then;
        }
        ptx::wgmma_wait_group<0>();
        release(ring.stage == 0 ? STAGES - 1 : ring.stage - 1);
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
        const float* const exponent = p.k_exponents + (r.head * p.max_tiles + r.first + r.tile) * TILE + row;
        finish(p, dk, exp2_scale(-exponent[0]), exp2_scale(-exponent[8]), g, 0, p.first, r, row);
        finish(p, dv, 1.0f, 1.0f, g, 1, p.second, r, row);
      }
    }
    ptx::bar_warp_sync();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.owner_empty[n % 2]));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_keys(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&s.full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&s.empty[i]), CONSUMERS / 32);
    }
    ptx::mbarrier_init(ptx::shared_address(&s.keys_full), 1);
    ptx::mbarrier_init(ptx::shared_address(&s.keys_empty), CONSUMERS / 32);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&s.owner_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&s.owner_empty[i]), CONSUMERS / 32);
    }
    s.exchange.init();
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
