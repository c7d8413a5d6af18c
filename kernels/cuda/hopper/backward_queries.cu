// dQ: Note [Two owners]. A CTA owns 128 queries of one head and walks the key tiles that they see, in steps of 64 keys.
// X is an A operand as it comes; a consumer warpgroup has 64 of the queries.
//
// S and dP of the next step are under way with dQ of this one.
#include "hopper/backward_rows.cuh"
#include "hopper/backward_slow.cuh"

using namespace backward;

constexpr int STAGES = 4;
constexpr int STAGE_BYTES = 2 * STEP_BYTES + STEP_WIDE;

struct alignas(1024) Operands {
  uint8_t q[TILE_BYTES];
  uint8_t dout[TILE_BYTES];
  struct Stage {
    uint8_t k[STEP_BYTES];
    uint8_t v[STEP_BYTES];
    uint8_t k_wide[STEP_WIDE];
  } stage[STAGES];
};

struct Owner {
  QueryColumns queries[2];  // of each half
  Record record;
};

struct Shared {
  Operands operands;
  KeyColumns columns[STAGES];
  Owner owner[2];
  Step steps[STAGES];
  Exchange exchange;
  uint64_t full[STAGES], empty[STAGES];
  uint64_t queries_full, queries_empty;
  uint64_t owner_full[2], owner_empty[2];
};
static_assert(sizeof(Shared) <= 227 * 1024, "the shared memory of one CTA");
extern "C" __constant__ const int backward_queries_shared_bytes = sizeof(Shared);

// The steps of an owner: key tiles and halves of them, ascending.
struct Steps {
  int tile = 0, half = 0;
  __device__ __forceinline__ bool advance(const Record& r, bool causal) {
    if (half == 0 && !(tile == r.count - 1 && r.last <= STEP)) {
      half = 1;
      return true;
    }
    half = 0;
    return ++tile < (causal ? r.tile + 1 : r.count);
  }
};

// ---- fetching --------------------------------------------------------------------------------------------------

// One warp: items of two query tiles, the owner's operands, and the operands of every step.
__device__ __forceinline__ void fetch(const BackwardParams& p, Shared& s) {
  const int lane = threadIdx.x % 32;
  const bool causal = p.causal;
  Ring<STAGES> ring;
  Ring<2> owners;
  uint32_t queries_phase = 1;
  int item = 0, second = 0;
#pragma unroll 1
  while (true) {
    if (!second) {
      if (lane == 0) item = atomicAdd(p.ticket, 1);
      item = ptx::shfl_idx(item, 0);
    }
    Owner& owner = s.owner[owners.stage];
    wait(ptx::shared_address(&s.owner_empty[owners.stage]), owners.phase ^ 1);
    Record r{};
    r.valid = item < p.status[layout::NUM_FORWARD];
    if (r.valid) {
      const int4 found = p.items[item];
      r.head = found.y, r.tile = found.z + second;
      r.first = p.tile_offsets[found.x], r.count = p.tile_offsets[found.x + 1] - r.first;
      second = !second && r.tile + 1 < r.count;
      const layout::Tile tile = p.tiles[r.first + r.tile];
      r.rows = tile.rows, r.start = tile.start;
      r.last = p.tiles[r.first + r.count - 1].rows;
    }
    const int64_t q_slot = r.head * p.max_tiles + r.first + r.tile;
    if (lane == 0) {
      const uint32_t barrier = ptx::shared_address(&s.owner_full[owners.stage]);
      owner.record = r;
      ptx::mbarrier_arrive_expect_tx(barrier, r.valid ? sizeof(owner.queries) : 0);
      if (r.valid) {
        ptx::cp_async_bulk_shared_global(ptx::shared_address(owner.queries), p.q_columns + q_slot * sizeof(owner.queries),
                                         sizeof(owner.queries), barrier);
      }
    }
    owners.advance();
    if (!r.valid) {
      if (lane == 0 && atomicAdd(p.ticket + 1, 1) == int(gridDim.x) - 1) p.ticket[0] = p.ticket[1] = 0;
      return;
    }

    wait(ptx::shared_address(&s.queries_empty), queries_phase);
    queries_phase ^= 1;
    if (lane == 0) {
      const uint32_t barrier = ptx::shared_address(&s.queries_full);
      ptx::mbarrier_arrive_expect_tx(barrier, 2 * TILE_BYTES);
      ptx::cp_async_bulk_shared_global(ptx::shared_address(s.operands.q), p.q + q_slot * TILE_BYTES, TILE_BYTES, barrier);
      ptx::cp_async_bulk_shared_global(ptx::shared_address(s.operands.dout), p.dout + q_slot * TILE_BYTES, TILE_BYTES,
                                       barrier);
    }
    Steps step;
    bool more = true;
    while (more) {
      const bool diagonal = causal && step.tile == r.tile;
      const Steps now = step;
      const int64_t slot = r.head / p.group * p.max_tiles + r.first + now.tile;
      more = step.advance(r, causal);
      wait(ptx::shared_address(&s.empty[ring.stage]), ring.phase ^ 1);
      if (lane == 0) {
        Operands::Stage& stage = s.operands.stage[ring.stage];
        KeyColumns& columns = s.columns[ring.stage];
        const uint32_t barrier = ptx::shared_address(&s.full[ring.stage]);
        const uint8_t* const values = diagonal ? p.v1 : p.v;
        s.steps[ring.stage] = {now.tile, now.half, (diagonal ? DIAGONAL : 0u) | (more ? 0u : ENDS)};
        ptx::mbarrier_arrive_expect_tx(barrier, STAGE_BYTES + sizeof(KeyColumns));
        copy_step(ptx::shared_address(stage.k), p.k + slot * TILE_BYTES, now.half, barrier);
        ptx::cp_async_bulk_shared_global(ptx::shared_address(&columns),
                                         p.k_columns + (4 * slot + 2 * now.half + diagonal) * sizeof(KeyColumns),
                                         sizeof(KeyColumns), barrier);
        copy_step(ptx::shared_address(stage.v), values + slot * TILE_BYTES, now.half, barrier);
        copy_step_wide(ptx::shared_address(stage.k_wide), p.k_wide + slot * 2 * TILE_BYTES, now.half, barrier);
      }
      ring.advance();
    }
  }
}

// ---- a step ----------------------------------------------------------------------------------------------------

// Element i of the accumulator: query `row` + 8 (i / 2 % 2) of the tile, key `first` + 8 (i / 4) + i % 2.
struct At {
  int row;
  int first;
  __device__ __forceinline__ static At of_thread(int half) {
    const int thread = ptx::thread_index();
    return {thread / 32 * 16 + thread % 32 / 4, STEP * half + 2 * (thread % 4)};
  }
  __device__ __forceinline__ Place operator()(int i) const { return {row + 8 * (i / 2 % 2), first + 8 * (i / 4) + i % 2}; }
};

// Hidden entries of a thread: element i is one if 8 (i / 4) + i % 2 > limit[i / 2 % 2].
struct Limits {
  int limit[2];
  __device__ __forceinline__ Limits(const Hidden& hidden, const At& at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) limit[h] = (hidden.diagonal ? at.row + 8 * h : hidden.rows - 1) - at.first;
  }
  __device__ __forceinline__ bool operator()(int i) const { return 8 * (i / 4) + i % 2 > limit[i / 2 % 2]; }
};

// S times the keys' factors in place, of one tile of 32 keys; the largest t of the thread's entries, rounded up, or 0.
template <int TILE_OF_STEP>
__device__ __forceinline__ float scale_scores(float (&x)[32], const float4* score, float4 row0, float4 row1) {
  float largest0 = -infinity(), largest1 = -infinity();
#pragma unroll
  for (int n = 4 * TILE_OF_STEP; n < 4 * TILE_OF_STEP + 4; ++n) {
    const float2 k = *reinterpret_cast<const float2*>(score + 4 * n);
#pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; ++i) x[i] = __fmul_rn(x[i], i % 2 == 0 ? k.x : k.y);
    largest0 = fmaxf(largest0, fmaxf(x[4 * n], x[4 * n + 1]));
    largest1 = fmaxf(largest1, fmaxf(x[4 * n + 2], x[4 * n + 3]));
  }
  return fmaxf(fmaxf(__fmaf_ru(largest0, row0.y, row0.x), __fmaf_ru(largest1, row1.y, row1.x)), 0.0f);
}

// Codes of P from scaled scores of one tile, in place, as numbers.
template <int TILE_OF_STEP>
__device__ __forceinline__ void fast_probabilities(float (&x)[32], float4 row0, float4 row1, uint32_t top) {
  const int shift = 8 - int(top);
#pragma unroll
  for (int i = 16 * TILE_OF_STEP; i < 16 * TILE_OF_STEP + 16; i += 2) {
    const float4 row = i % 4 == 0 ? row0 : row1;
    const float low = probability(x[i], row.y, row.x, shift), high = probability(x[i + 1], row.y, row.x, shift);
    const float2 codes = formats::decode_e4m3x2(ptx::cvt_rn_satfinite_e4m3x2_f32(high, low));
    x[i] = codes.x;
    x[i + 1] = codes.y;
  }
}

// X from codes of P in the place of dP, of one tile, not yet rounded; the largest magnitude of the thread's entries.
template <int TILE_OF_STEP, bool DIAGONAL>
__device__ __forceinline__ float fast_gradients(const float (&x)[32], float (&dp)[32], const float4* score, float of_value,
                                                uint32_t top, float4 row0, float4 row1, float of_dout) {
  float amax = 0.0f;
  const float of_code = __uint_as_float((top - 8) << 23);
  const float scale0 = __fmul_rn(row0.w, of_code), scale1 = __fmul_rn(row1.w, of_code);
  const float of_block = __fmul_rn(of_value, of_dout);
#pragma unroll
  for (int n = 4 * TILE_OF_STEP; n < 4 * TILE_OF_STEP + 4; ++n) {
    const float4 c = score[4 * n];
    const float f0 = DIAGONAL ? __fmul_rn(c.z, of_dout) : of_block, f1 = DIAGONAL ? __fmul_rn(c.w, of_dout) : of_block;
#pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; ++i) {
      const float d = __fmaf_rn(dp[i], i % 2 == 0 ? f0 : f1, i % 4 < 2 ? row0.z : row1.z);
      dp[i] = __fmul_rn(__fmul_rn(__fmul_rn(x[i], d), i % 4 < 2 ? scale0 : scale1), i % 2 == 0 ? c.x : c.y);
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

template <int TILE_OF_STEP>
__device__ __forceinline__ void round_and_pack(uint32_t (&a)[16], const float (&x)[32], uint32_t amax) {
  const float least = least_gradient(amax);
#pragma unroll
  for (int i = 8 * TILE_OF_STEP; i < 8 * TILE_OF_STEP + 8; ++i) {
    a[i] = ptx::cvt_rn_bf16x2_f32(round_scaled(x[2 * i + 1], least), round_scaled(x[2 * i], least));
  }
}
// ---- consuming -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void consume(const BackwardParams& p, Shared& s) {
  const int warp = uniform(threadIdx.x / 32), group = warp / 4, quad = threadIdx.x % 4;
  uint32_t phases = 0;  // bit 0 of the exchange of E, bit 1 of that of amax
  Ring<STAGES> ring;
  Ring<2> owners;
  uint32_t queries_phase = 0;
  float x[32], dp[32], dq[D / 2];

  uint32_t q[D / 8], dout[D / 8];  // from the registers, because shared memory is what the FP8 products wait for
  const auto wait_full = [&]() { wait(ptx::shared_address(&s.full[ring.stage]), ring.phase); };
  const auto multiply = [&](int stage) {
    ptx::wgmma_fence();
    multiply_channels(x, q, ptx::shared_address(s.operands.stage[0].k), stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
    multiply_channels(dp, dout, ptx::shared_address(s.operands.stage[0].v), stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
  };
  const auto release = [&](int stage) {
    ptx::bar_warp_sync();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.empty[stage]));
  };

#pragma unroll 1
  while (true) {
    wait(ptx::shared_address(&s.owner_full[owners.stage]), owners.phase);
    const Owner& owner = s.owner[owners.stage];
    if (!uniform(owner.record.valid)) return;
    wait(ptx::shared_address(&s.queries_full), queries_phase);
    queries_phase ^= 1;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) {
      dq[i] = 0.0f;
      ptx::keep(dq[i]);  // zeros before the first wgmma, and not where the loop begins
    }
    const int row = At::of_thread(0).row;
    load_rows(q, s.operands.q, row);
    load_rows(dout, s.operands.dout, row);
    ptx::bar_warp_sync();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.queries_empty));
    const QueryColumns& queries = owner.queries[group];
    const auto numbers = [&](int r) {
      const float2 score = numbers_of(queries.score, r), gradient = numbers_of(queries.gradient, r);
      return make_float4(score.x, score.y, gradient.x, gradient.y);
    };
    const float4 row0 = numbers(row % STEP), row1 = numbers(row % STEP + 8);
    const float of_dout = queries.summary.factor[row / 32 % 2];
    const RowFlags rows(p, queries.summary);
    int before = -1;  // the stage that is free once dQ of the step before is done
    wait_full();
    multiply(ring.stage);
#pragma unroll 1
    while (true) {
      const int stage = ring.stage;
      const KeyColumns& columns = s.columns[stage];
      const Step& step = s.steps[stage];
      const uint32_t flags = flags_of(rows, columns.summary, step);
      const bool ends = flags & ENDS;
      const Hidden hidden{(flags & DIAGONAL) != 0, int(uniform(step.tile == owner.record.count - 1 ? owner.record.last : TILE))};
      const bool masked = hidden.diagonal || (!p.causal && hidden.rows < TILE);
      bool done = false;
      uint32_t a[16];

      ptx::wgmma_wait_group<1>();
      keep_all(x);
      if (before >= 0) release(before);
      if (!(flags & SLOW)) {
        // ---- P -----------------------------------------------------------------------------------------------
        if (masked) hide_scores(x, Limits(hidden, At::of_thread(step.half)));
        const float4* const score = columns.score + quad;
        s.exchange.send(E_FIRST, warp, __float_as_uint(scale_scores<0>(x, score, row0, row1)));
        s.exchange.send(E_SECOND, warp, __float_as_uint(scale_scores<1>(x, score, row0, row1)));
        const uint2 first = s.exchange.receive(E_FIRST, warp, phases & 1);
        const uint32_t top0 = known_top(first.x);
        fast_probabilities<0>(x, row0, row1, top0);
        const uint2 second = s.exchange.receive(E_SECOND, warp, phases & 1);
        const uint32_t top1 = known_top(second.x);
        fast_probabilities<1>(x, row0, row1, top1);
        phases ^= 1;
        if (!uniform(is_low(first, second))) {
          // ---- X ---------------------------------------------------------------------------------------------
          ptx::wgmma_wait_group<0>();
          keep_all(dp);
          const float v0 = columns.summary.factor[0], v1 = columns.summary.factor[1];
          float largest = hidden.diagonal ? fast_gradients<0, true>(x, dp, score, v0, top0, row0, row1, of_dout)
                                          : fast_gradients<0, false>(x, dp, score, v0, top0, row0, row1, of_dout);
          if (masked) largest = hide_gradients<0>(dp, Limits(hidden, At::of_thread(step.half)));
          s.exchange.send(AMAX_FIRST, warp, __float_as_uint(largest));
          largest = hidden.diagonal ? fast_gradients<1, true>(x, dp, score, v1, top1, row0, row1, of_dout)
                                    : fast_gradients<1, false>(x, dp, score, v1, top1, row0, row1, of_dout);
          if (masked) largest = hide_gradients<1>(dp, Limits(hidden, At::of_thread(step.half)));
          s.exchange.send(AMAX_SECOND, warp, __float_as_uint(largest));
          const uint2 amax0 = s.exchange.receive(AMAX_FIRST, warp, phases >> 1);
          round_and_pack<0>(a, dp, amax0.x);
          const uint2 amax1 = s.exchange.receive(AMAX_SECOND, warp, phases >> 1);
          round_and_pack<1>(a, dp, amax1.x);
          phases ^= 2;
          done = !uniform(is_unusual(amax0, amax1, flags & TINY));
        }
      }
      if (!done) {
        ptx::wgmma_wait_group<0>();
        multiply(stage);
        ptx::wgmma_wait_group<0>();
        keep_all(x);
        keep_all(dp);
        const Record& r = owner.record;
        const Meeting m{r.head * p.max_tiles + r.first + r.tile, r.head / p.group * p.max_tiles + r.first + step.tile,
                        hidden};
        slow_probabilities(x, p, m, s.exchange, At::of_thread(step.half));
        slow_gradients(dp, p, m, s.exchange, At::of_thread(step.half));
        pack(a, dp);
      }
      ptx::wgmma_fence();
      multiply_tokens(dq, a, ptx::shared_address(s.operands.stage[0].k_wide), stage * sizeof(Operands::Stage));
      ptx::wgmma_commit_group();
      before = stage;
      ring.advance();
      if (ends) break;
      wait_full();
      multiply(ring.stage);
    }
    ptx::wgmma_wait_group<0>();
    release(before);
#pragma unroll
    for (int i = 0; i < D / 2; ++i) ptx::keep(dq[i]);

    // ---- dQ --------------------------------------------------------------------------------------------------
    const Record& r = owner.record;
    const float* const exponent = p.q_exponents + (r.head * p.max_tiles + r.first + r.tile) * TILE + row;
    const float factor0 = exp2_scale(-exponent[0]), factor1 = exp2_scale(-exponent[8]);
#pragma unroll
    for (int i = 0; i < D / 2; ++i) dq[i] = __fmul_rn(dq[i], i % 4 < 2 ? factor0 : factor1);
    store_rows(dq, p.first, r.head, r.start, row, r.rows);
    ptx::bar_warp_sync();
    if (ptx::thread_index() % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&s.owner_empty[owners.stage]));
    owners.advance();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_queries(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&s.full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&s.empty[i]), CONSUMERS / 32);
    }
    ptx::mbarrier_init(ptx::shared_address(&s.queries_full), 1);
    ptx::mbarrier_init(ptx::shared_address(&s.queries_empty), CONSUMERS / 32);
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
    ptx::setmaxnreg_dec<40>();
    if (warp == CONSUMERS / 32) fetch(p, s);
  } else {
    ptx::setmaxnreg_inc<232>();
    consume(p, s);
  }
}
