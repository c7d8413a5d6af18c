// The Hopper forward: from Q, K and V to O and l in registers, tile after tile.
#pragma once

#include "hopper/forward_shared.cuh"

__device__ __forceinline__ void release(uint64_t& empty) {
  ptx::bar_warp_sync();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty));
}

template <int N>
__device__ __forceinline__ void keep_all(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) ptx::keep(x[i]);
}
template <int N>
__device__ __forceinline__ void keep_all(uint32_t (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) ptx::keep(x[i]);
}

// s = Q K^T of this warpgroup's rows.
__device__ __forceinline__ void start_scores(float (&s)[64], Shared& shared, uint32_t q, uint32_t stage) {
  constexpr int WIDTH = ROW_BYTES < 128 ? ROW_BYTES : 128;
  const uint64_t k = hopper::describe_k_major<WIDTH>(ptx::shared_address(slot(shared, pick(K_SLOT, stage))));
  const uint64_t a = hopper::describe_k_major<WIDTH>(q);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < ROW_BYTES / 32; ++i) {  // a step is 32 bytes of each row
    const uint32_t at = (i / 4 * hopper::PANEL_BYTES + i % 4 * 32) >> 4;
    if constexpr (E4M3) {
      ptx::wgmma_e4m3_ss<128>(s, hopper::advance(a, at), hopper::advance(k, at), i > 0);
    } else {
      ptx::wgmma_bf16_ss<128>(s, hopper::advance(a, at), hopper::advance(k, at), i > 0);
    }
  }
  ptx::wgmma_commit_group();
}

// The same number, as one that the compiler knows to be equal in all lanes.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return ptx::shfl_idx(x, 0); }

__device__ __forceinline__ uint64_t describe_values(Shared& shared, uint32_t stage) {
  const int distance = pick(V_DISTANCE, stage);
  const uint32_t first = ptx::shared_address(slot(shared, PANELS * distance));
  return hopper::describe_mn_major(first, distance * hopper::PANEL_BYTES);
}

// o += P V over the keys of one half of a tile, and l += P 1 beside it.
template <int HALF>
__device__ __forceinline__ void start_values(float (&o)[O_REGISTERS], const uint32_t (&a)[32], uint64_t v) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 4 * HALF; i < 4 * HALF + 4; ++i) {
    ptx::wgmma_bf16_rs<D + 8>(o, a + 4 * i, hopper::advance(v, i * hopper::MN_STEP), 1);
  }
  ptx::wgmma_commit_group();
}

struct State {
  float s[64];
  float o[O_REGISTERS];  // and in the last four l, in every column the same
  uint32_t a[32];        // P as operand A
  hopper::QueryRows rows;
};

// From S, which has arrived, to scaled scores, and top: m of the tile. In the `diagonal` tile the rows of this thread,
// of the `half` of the query tile, see the keys up to last[h] only; scores hidden from a whole half stay as they are.
__device__ __forceinline__ void measure(State& t, bool slow, const hopper::Factors& of_keys, const float* factors,
                                        bool diagonal, uint32_t half, const int (&last)[2], float (&top)[2]) {
  hopper::scale_scores(t.s, of_keys);
  float largest[2];
  const bool found = hopper::find_largest_bits(t.s, largest);
  if (slow) {
    if (diagonal) hopper::hide_scores<0, 64>(t.s, last);
    const int seen[2] = {diagonal ? last[0] : layout::TILE, diagonal ? last[1] : layout::TILE};
    hopper::saturate_scores(t.s, factors, seen, t.rows);
    hopper::find_largest<64>(t.s, largest);
  } else if (diagonal && half == 0) {
    hopper::hide_scores<0, 32>(t.s, last);
    hopper::find_largest<32>(t.s, largest);
  } else if (diagonal) {
    hopper::hide_scores<32, 64>(t.s, last);
    hopper::find_largest<64>(t.s, largest);
  } else if (ptx::vote_any(!found)) {
    hopper::find_largest<64>(t.s, largest);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = slow ? hopper::ceil_slow(largest[h], t.rows.c) : hopper::ceil_product(largest[h], t.rows.scaled[h]);
  }
}

// M grows to `top`. `below`: top - M; `factor`: what O and l are to be multiplied by. Whether that changes them.
__device__ __forceinline__ bool raise_top(State& t, const float (&top)[2], float (&below)[2], float (&factor)[2]) {
  bool grown = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float before = t.rows.top[h], after = fmaxf(before, top[h]), step = __fsub_rn(before, after);
    below[h] = __fsub_rn(top[h], after);
    factor[h] = step >= -126.0f ? hopper::exp2_integer(step) : 0.0f;
    grown |= after > before;
    t.rows.top[h] = after;
  }
  return ptx::vote_any(grown);
}

__device__ __forceinline__ void rescale(State& t, const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < O_REGISTERS; ++i) t.o[i] = __fmul_rn(t.o[i], factor[i / 2 % 2]);
}

// One half of P, from scaled scores, as operand A.
template <int HALF, hopper::Way WAY>
__device__ __forceinline__ void make_half(State& t, const float (&top)[2], const uint32_t (&scale)[2]) {
  constexpr int STEP = hopper::AT_ONCE;
#pragma unroll
  for (int i = 8 * HALF; i < 8 * HALF + 8; i += STEP) {
    uint32_t words[E4M3 ? STEP : 2 * STEP];
    hopper::round_blocks<E4M3, WAY>(words, t.s + 4 * i, top, t.rows);
    hopper::expand_blocks<E4M3>(t.a + 2 * i, words, scale);
  }
}

template <int HALF>
__device__ __forceinline__ void make_operand(State& t, hopper::Way way, const float (&top)[2],
                                             const uint32_t (&scale)[2]) {
  if (E4M3 && way == hopper::Way::SATURATED) {
    make_half<HALF, hopper::Way::SATURATED>(t, top, scale);
  } else if (way == hopper::Way::CLAMPED) {
    make_half<HALF, hopper::Way::CLAMPED>(t, top, scale);
  } else {
    make_half<HALF, hopper::Way::SLOW>(t, top, scale);
  }
}

// The products of the last tile, l of P and O of P' apart, where it `folds`; a holds P's codes as they are then.
__device__ __forceinline__ void add_apart(State& t, Shared& shared, uint32_t stage, bool folds, const float (&below)[2],
                                          int row) {
  const uint64_t ones = hopper::describe_mn_major(ptx::shared_address(slot(shared, 0)), hopper::PANEL_BYTES);
  uint32_t p[32];
  constexpr float NONE = 8.0f;  // P's codes are in units of 2^(below - 8)
  const uint32_t scale[2] = {hopper::operand_scale<false>(folds ? below[0] : NONE),
                             hopper::operand_scale<false>(folds ? below[1] : NONE)};
#pragma unroll
  for (int i = 0; i < 32; ++i) p[i] = ptx::mul_rn_bf16x2(t.a[i], scale[i % 2]);
  float l[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) l[i] = t.o[D / 2 + i];
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 8; ++i) ptx::wgmma_bf16_rs<8>(l, p + 4 * i, hopper::advance(ones, i * hopper::MN_STEP), 1);
  ptx::wgmma_commit_group();
  if (folds) hopper::fold_p(t.a, below, row, shared.fold[stage]);
  const uint64_t v = describe_values(shared, uniform(stage));
  start_values<0>(t.o, t.a, v);
  start_values<1>(t.o, t.a, v);
  ptx::wgmma_wait_group<0>();
  keep_all(l);
  keep_all(p);
  keep_all(t.o);
  keep_all(t.a);
#pragma unroll
  for (int i = 0; i < 4; ++i) t.o[D / 2 + i] = l[i];  // what P' added to it is thrown away
}

// All key tiles of a query tile, the S of the first of which is under way; the rings follow. S of the next tile and P V
// of this one are started together: Note [Forward on Hopper].
__device__ __forceinline__ void add_tiles(State& t, Shared& shared, KvRing& k, KvRing& v, uint32_t q, int row, int keys,
                                          bool causal, bool slow) {
  const int last[2] = {row, row + 8};
  const uint32_t half = uniform(row / 64);
  const bool folds = E4M3 && causal;
  float below[2];
  hopper::Factors of_keys;
  hopper::load_factors(of_keys, shared.factors[k.stage]);  // in flight while S is
  ptx::wgmma_wait_group<0>();
  keep_all(t.s);
#pragma unroll 1
  for (int left = keys - 1;; --left) {
    const bool diagonal = causal && left == 0;
    float top[2], factor[2];
    measure(t, slow, of_keys, shared.factors[k.stage], diagonal, half, last, top);
    release(shared.k_empty[k.stage]);
    k.advance();
    const uint32_t k_stage = uniform(k.stage);
    const bool grown = raise_top(t, top, below, factor);
    const bool high = ptx::vote_any(fmaxf(top[0], top[1]) >= hopper::HIGH_TOP);
    const auto way = slow              ? hopper::Way::SLOW
                     : !E4M3 || high ? hopper::Way::CLAMPED
                                     : hopper::Way::SATURATED;
    const bool codes = E4M3 && diagonal;  // a is to hold P's codes, for add_apart
    const uint32_t scale[2] = {codes ? hopper::EXPANDED_SCALE : hopper::operand_scale<E4M3>(below[0]),
                               codes ? hopper::EXPANDED_SCALE : hopper::operand_scale<E4M3>(below[1])};
    ptx::wgmma_wait_group<1>();  // the first half of P V, which frees the first half of A
#pragma unroll
    for (int i = 0; i < 16; ++i) ptx::keep(t.a[i]);
    make_operand<0>(t, way, top, scale);
    ptx::wgmma_wait_group<0>();
    keep_all(t.o);
#pragma unroll
    for (int i = 16; i < 32; ++i) ptx::keep(t.a[i]);
    if (left != keys - 1) {
      release(shared.v_empty[v.stage]);
      v.advance();
    }
    const uint32_t v_stage = uniform(v.stage);
    if (grown && left != keys - 1) rescale(t, factor);  // at first O is 0
    if (diagonal && half == 0) {  // every key of the second half is hidden
#pragma unroll
      for (int i = 16; i < 32; ++i) t.a[i] = 0;
    } else {
      make_operand<1>(t, way, top, scale);
    }
    if (left == 0) break;

    const uint64_t values = describe_values(shared, v_stage);
    hopper::wait(ptx::shared_address(&shared.k_full[k.stage]), k.phase);
    hopper::wait(ptx::shared_address(&shared.v_full[v.stage]), v.phase);
    start_scores(t.s, shared, q, k_stage);
    start_values<0>(t.o, t.a, values);
    start_values<1>(t.o, t.a, values);
    hopper::load_factors(of_keys, shared.factors[k.stage]);
    ptx::wgmma_wait_group<2>();  // S
    keep_all(t.s);
  }
  hopper::wait(ptx::shared_address(&shared.v_full[v.stage]), v.phase);
  add_apart(t, shared, v.stage, folds, below, row);
  release(shared.v_empty[v.stage]);
  v.advance();
}
