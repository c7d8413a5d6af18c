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

// From S, which has arrived, to scaled scores, and top: m of the tile. If MASKED, the rows of this thread see the keys
// up to last[h].
template <bool MASKED>
__device__ __forceinline__ void measure(State& t, bool slow, const float* factors, const int (&last)[2],
                                        float (&top)[2]) {
  float largest[2];
  if (slow) {
    hopper::scale_scores<true, MASKED>(t.s, factors, last, t.rows, largest);
  } else {
    hopper::scale_scores<false, MASKED>(t.s, factors, last, t.rows, largest);
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

// One half of P, from scaled scores, as operand A; if KEEP, also as it is, rounded.
template <int HALF, bool SLOW, bool KEEP>
__device__ __forceinline__ void make_operand_so(State& t, const float (&top)[2], const float (&below)[2],
                                                uint32_t* held) {
  const uint32_t scale[2] = {hopper::operand_scale<E4M3>(below[0]), hopper::operand_scale<E4M3>(below[1])};
  constexpr int STEP = hopper::AT_ONCE, WORDS = HELD / 16 * STEP;
#pragma unroll
  for (int i = 8 * HALF; i < 8 * HALF + 8; i += STEP) {
    uint32_t words[WORDS];
    hopper::round_blocks<E4M3, SLOW>(words, t.s + 4 * i, top, t.rows);
    hopper::expand_blocks<E4M3>(t.a + 2 * i, words, scale);
#pragma unroll
    for (int j = 0; KEEP && j < WORDS; ++j) held[i * HELD / 16 + j] = words[j];
  }
}

template <int HALF, bool KEEP>
__device__ __forceinline__ void make_operand(State& t, bool slow, const float (&top)[2], const float (&below)[2],
                                             uint32_t* held) {
  if (slow) {
    make_operand_so<HALF, true, KEEP>(t, top, below, held);
  } else {
    make_operand_so<HALF, false, KEEP>(t, top, below, held);
  }
}

// The products of a tile, l and O apart: in a diagonal tile P' stands in for P. What P' adds to l is thrown away.
__device__ __forceinline__ void add_apart(State& t, Shared& shared, uint32_t stage, const uint32_t (&held)[HELD],
                                          const float (&below)[2], int row, bool diagonal) {
  const uint64_t ones = hopper::describe_mn_major(ptx::shared_address(slot(shared, 0)), hopper::PANEL_BYTES);
  float l[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) l[i] = t.o[D / 2 + i];
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 8; ++i) ptx::wgmma_bf16_rs<8>(l, t.a + 4 * i, hopper::advance(ones, i * hopper::MN_STEP), 1);
  ptx::wgmma_commit_group();
  uint32_t folded[32];
  if (E4M3 && diagonal) {
    hopper::fold_p<E4M3>(folded, held, below, row, shared.fold[stage]);
  } else {
#pragma unroll
    for (int i = 0; i < 32; ++i) folded[i] = t.a[i];
  }
  const uint64_t v = describe_values(shared, uniform(stage));
  start_values<0>(t.o, folded, v);
  start_values<1>(t.o, folded, v);
  ptx::wgmma_wait_group<0>();
  keep_all(l);
  keep_all(t.o);
  keep_all(t.a);
  keep_all(folded);
#pragma unroll
  for (int i = 0; i < 4; ++i) t.o[D / 2 + i] = l[i];
}

// S of the next key tile beside P V of the one before, and from S to P: Note [Forward on Hopper]. LAST: the next is the
// last one.
template <bool LAST>
__device__ __forceinline__ void step_tiles(State& t, Shared& shared, KvRing& k, KvRing& v, uint32_t q, bool slow,
                                           const int (&last)[2], float (&below)[2], uint32_t* held) {
  const uint32_t k_stage = uniform(k.stage);
  const uint64_t values = describe_values(shared, uniform(v.stage));
  hopper::wait(ptx::shared_address(&shared.k_full[k.stage]), k.phase);
  hopper::wait(ptx::shared_address(&shared.v_full[v.stage]), v.phase);
  start_scores(t.s, shared, q, k_stage);
  start_values<0>(t.o, t.a, values);
  start_values<1>(t.o, t.a, values);

  float top[2], factor[2];
  ptx::wgmma_wait_group<2>();  // S
  keep_all(t.s);
  measure<LAST>(t, slow, shared.factors[k.stage], last, top);
  release(shared.k_empty[k.stage]);
  k.advance();
  const bool grown = raise_top(t, top, below, factor);
  ptx::wgmma_wait_group<1>();  // the first half of P V, which frees the first half of A
#pragma unroll
  for (int i = 0; i < 16; ++i) ptx::keep(t.a[i]);
  make_operand<0, LAST>(t, slow, top, below, held);
  ptx::wgmma_wait_group<0>();
  keep_all(t.o);
#pragma unroll
  for (int i = 16; i < 32; ++i) ptx::keep(t.a[i]);
  release(shared.v_empty[v.stage]);
  v.advance();
  if (grown) rescale(t, factor);
  make_operand<1, LAST>(t, slow, top, below, held);
}

// All key tiles of a query tile, the S of the first of which is under way; the rings follow.
__device__ __forceinline__ void add_tiles(State& t, Shared& shared, KvRing& k, KvRing& v, uint32_t q, int row, int keys,
                                          bool causal, bool slow) {
  const int all[2] = {127, 127}, last[2] = {causal ? row : 127, causal ? row + 8 : 127};
  float top[2], below[2], factor[2];
  uint32_t held[HELD];
  ptx::wgmma_wait_group<0>();
  keep_all(t.s);
  if (keys > 1) {
    measure<false>(t, slow, shared.factors[k.stage], all, top);
    release(shared.k_empty[k.stage]);
    k.advance();
    raise_top(t, top, below, factor);
    make_operand<0, false>(t, slow, top, below, nullptr);
    make_operand<1, false>(t, slow, top, below, nullptr);
#pragma unroll 1
    for (int j = 1; j < keys - 1; ++j) step_tiles<false>(t, shared, k, v, q, slow, all, below, nullptr);
    step_tiles<true>(t, shared, k, v, q, slow, last, below, held);
  } else {
    measure<true>(t, slow, shared.factors[k.stage], last, top);
    release(shared.k_empty[k.stage]);
    k.advance();
    raise_top(t, top, below, factor);
    make_operand<0, true>(t, slow, top, below, held);
    make_operand<1, true>(t, slow, top, below, held);
  }
  hopper::wait(ptx::shared_address(&shared.v_full[v.stage]), v.phase);
  add_apart(t, shared, v.stage, held, below, row, causal);
  release(shared.v_empty[v.stage]);
  v.advance();
}
