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

// The query tile and the key tile at hand.
struct View {
  const Work& work;
  const float* q_exponents;
  bool causal;
  bool last;  // the last key tile: it may hold keys past the document, and is the diagonal tile if causal
};

// The row of h = 0, and the half of the query tile that it is in; computed anew where they are used.
__device__ __forceinline__ int row_of_thread() {
  const uint32_t thread = ptx::thread_index() - 128;
  return int(thread / 32 * 16 + thread % 32 / 4);
}
__device__ __forceinline__ bool in_first_half() { return ptx::thread_index() < 256; }

// M becomes the ceiling of the tile's largest c S, if that is larger. `factor`: what O and l are to be multiplied by.
// Whether any changes, in a row of this warp.
__device__ __forceinline__ bool raise_top(State& t, bool slow, const float (&largest)[2], float (&factor)[2]) {
  bool grown = false, high = slow;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float top = slow ? hopper::ceil_slow(largest[h], t.rows.c)
                           : hopper::ceil_product(largest[h], t.rows.scaled[h]);
    const float before = t.rows.top[h], after = fmaxf(before, top), step = __fsub_rn(before, after);
    factor[h] = step >= -126.0f ? hopper::exp2_integer(step) : 0.0f;
    grown |= after > before;
    high |= after >= hopper::BITS_TOP;
    t.rows.top[h] = after;
    t.rows.known[h] = after >= 0.0f && !slow ? __fadd_rn(after, hopper::MAGIC) : hopper::not_a_number();
  }
  t.rows.slow = ptx::vote_any(high);
  return ptx::vote_any(grown);
}

// From S, which has arrived, to scaled scores and M; the result of `raise_top`. Scores that are hidden from a whole half
// of the query tile stay as they are.
__device__ __forceinline__ bool measure(State& t, const View& view, const hopper::Factors& of_keys,
                                        const float* factors, float (&factor)[2]) {
  hopper::scale_scores(t.s, of_keys);
  float largest[2];
  hopper::find_largest_bits(t.s, largest);
  const bool news = hopper::is_news(largest[0], t.rows, 0) | hopper::is_news(largest[1], t.rows, 1) | view.last;
  if (!ptx::vote_any(news)) return false;
  const bool slow = view.work.slow, diagonal = view.causal && view.last;
  const int row = row_of_thread();
  const int last[2] = {diagonal ? row : layout::TILE, diagonal ? row + 8 : layout::TILE};
  if (slow) {
    const float of_row[2] = {hopper::decode_exponent(view.q_exponents[row]),
                             hopper::decode_exponent(view.q_exponents[row + 8])};
    hopper::saturate_scores(t.s, factors, last, of_row, t.rows);
    hopper::find_largest<64>(t.s, largest);
  } else if (diagonal && in_first_half()) {
    hopper::hide_scores<0, 32>(t.s, last);
    hopper::find_largest<32>(t.s, largest);
  } else {
    if (diagonal) {
      hopper::hide_scores<32, 64>(t.s, last);
    } else if (view.last) {
      hopper::hide_nan(t.s);
    }
    hopper::find_largest<64>(t.s, largest);
  }
  return raise_top(t, slow, largest, factor);
}

__device__ __forceinline__ void rescale(State& t, const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < O_REGISTERS; ++i) t.o[i] = __fmul_rn(t.o[i], factor[i / 2 % 2]);
}

// One half of P, from scaled scores, as operand A.
template <int HALF>
__device__ __forceinline__ void make_half(State& t, const View& view) {
  uint32_t* const a = t.a + 16 * HALF;
  const float* const s = t.s + 32 * HALF;
  if (HALF == 1 && view.causal && view.last && in_first_half()) {  // every key is hidden
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = 0;
  } else if (t.rows.slow) {
    hopper::make_pairs_slow<FRACTION_BITS, 8>(a, s, t.rows);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i += AT_ONCE) {
      hopper::make_pairs<FRACTION_BITS, AT_ONCE>(a + 2 * i, s + 4 * i, t.rows);
    }
  }
}

// All key tiles of a query tile, the S of the first of which is under way; the rings follow. S of the next tile and P V
// of this one are started together: Note [Forward on Hopper].
__device__ __forceinline__ void add_tiles(State& t, Shared& shared, KvRing& k, KvRing& v, uint32_t q, const Work& work,
                                          const float* q_exponents, bool causal) {
  View view = {work, q_exponents, causal, false};
  t.rows.slow = false;
  hopper::Factors of_keys;
  hopper::load_factors(of_keys, shared.factors[k.stage]);  // in flight while S is
  ptx::wgmma_wait_group<0>();
  keep_all(t.s);
  const int keys = work.keys;
#pragma unroll 1
  for (int left = keys - 1;; --left) {
    view.last = left == 0;
    float factor[2];
    const bool grown = measure(t, view, of_keys, shared.factors[k.stage], factor);
    release(shared.k_empty[k.stage]);
    k.advance();
    const uint32_t k_stage = uniform(k.stage);
    ptx::wgmma_wait_group<1>();  // the first half of P V, which frees the first half of A
#pragma unroll
    for (int i = 0; i < 16; ++i) ptx::keep(t.a[i]);
    make_half<0>(t, view);
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
    make_half<1>(t, view);
    const uint64_t values = describe_values(shared, v_stage);
    if (left == 0) {
      hopper::wait(ptx::shared_address(&shared.v_full[v.stage]), v.phase);
      start_values<0>(t.o, t.a, values);
      start_values<1>(t.o, t.a, values);
      break;
    }
    hopper::wait(ptx::shared_address(&shared.k_full[k.stage]), k.phase);
    hopper::wait(ptx::shared_address(&shared.v_full[v.stage]), v.phase);
    start_scores(t.s, shared, q, k_stage);
    start_values<0>(t.o, t.a, values);
    start_values<1>(t.o, t.a, values);
    hopper::load_factors(of_keys, shared.factors[k.stage]);
    ptx::wgmma_wait_group<2>();  // S
    keep_all(t.s);
  }
  ptx::wgmma_wait_group<0>();
  keep_all(t.o);
  keep_all(t.a);
  release(shared.v_empty[v.stage]);
  v.advance();
}
