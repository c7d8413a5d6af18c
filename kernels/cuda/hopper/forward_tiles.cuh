// The Hopper forward: from Q, K and V to O and l in registers, tile after tile.
#pragma once

#include "hopper/forward_shared.cuh"

// What would take long to find anew.
struct Self {
  uint32_t arrives;  // whether this lane does, for its warp: Note [Arrivals]
  uint32_t shared;  // address of Shared
  uint32_t group;   // of warps: 0 or 1
};

// Note [Turns]
// ~~~~~~~~~~~~
// The two warpgroups start their products of Q and K in turns. Otherwise both multiply at once and then compute at once,
// and which of the two it will be is left to chance. Barrier 1 + g tells warpgroup g that it is its turn; at first it is
// that of warpgroup 0, and a warpgroup that has no rows takes its turns too. Every key tile is a turn of each.
constexpr uint32_t TURN = 1;
__device__ __forceinline__ void await_turn(const Self& self) { ptx::barrier_sync(TURN + self.group, 128 * GROUPS); }
__device__ __forceinline__ void give_turn(const Self& self) { ptx::barrier_arrive(TURN + 1 - self.group, 128 * GROUPS); }

// By the four warps of a group each; `groups`: how many it speaks for.
__device__ __forceinline__ void release(const Self& self, Barrier kind, uint32_t stage, uint32_t groups = 1) {
  ptx::bar_warp_sync();
  if (self.arrives) ptx::mbarrier_arrive(barrier(self.shared, kind, stage), groups);
}
__device__ __forceinline__ void wait(const Self& self, Barrier kind, uint32_t stage, uint32_t parity) {
  hopper::wait(barrier(self.shared, kind, stage), parity);
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

// The same number, as one that the compiler knows to be equal in all lanes.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return ptx::shfl_idx(x, 0); }

// Note [Low words]
// ~~~~~~~~~~~~~~~~
// Of a descriptor only the low word differs between stages and steps. It is computed in 32 bits, linearly: addresses
// stay below 2^18, so that no field needs a mask, and no sum carries into the next one.
__device__ __forceinline__ uint64_t with_low_word(uint64_t descriptor, uint32_t low) {
  return (descriptor >> 32) << 32 | low;
}

constexpr uint32_t SLOT_PIECES = hopper::PANEL_BYTES >> 4;

// Low words of slot 0, of K's slots and of V's.
__device__ __forceinline__ uint32_t low_word(uint32_t shared) {
  return (shared >> 4) + (SLOTS - 1) * SLOT_PIECES + (16 >> 4 << 16);
}
__device__ __forceinline__ uint32_t low_word_of_keys(uint32_t shared, uint32_t stage) {
  return low_word(shared) - (K_SLOT + stage * K_SLOT_STEP) * SLOT_PIECES;
}
__device__ __forceinline__ uint32_t low_word_of_values(uint32_t shared, uint32_t stage) {
  return (shared >> 4) + (SLOTS - 1) * SLOT_PIECES +
         pick(V_DISTANCE, stage) * ((SLOT_PIECES << 16) - PANELS * SLOT_PIECES);
}

// In turn, s = Q K^T of this warpgroup's rows, given low words.
__device__ __forceinline__ void start_scores(const Self& self, float (&s)[64], uint32_t q, uint32_t k) {
  await_turn(self);
  const uint64_t rest = hopper::describe_k_major<WIDTH>(0);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < ROW_BYTES / 32; ++i) {  // a step is 32 bytes of each row
    const uint32_t at = (i / 4 * hopper::PANEL_BYTES + i % 4 * 32) >> 4;
    if constexpr (E4M3) {
      ptx::wgmma_e4m3_ss<128>(s, with_low_word(rest, q + at), with_low_word(rest, k + at), i > 0);
    } else {
      ptx::wgmma_bf16_ss<128>(s, with_low_word(rest, q + at), with_low_word(rest, k + at), i > 0);
    }
  }
  ptx::wgmma_commit_group();
  give_turn(self);
}

// o += P V over the keys of one half of a tile, and l += P 1 beside it.
template <int HALF>
__device__ __forceinline__ void start_values(float (&o)[O_REGISTERS], const uint32_t (&a)[32], uint32_t v) {
  const uint64_t rest = hopper::describe_mn_major(0, 0);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 4 * HALF; i < 4 * HALF + 4; ++i) {
    ptx::wgmma_bf16_rs<D + 8>(o, a + 4 * i, with_low_word(rest, v + i * hopper::MN_STEP), 1);
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
  uint32_t heads;
  bool causal;
  bool last;  // the last key tile: it may hold keys past the document, and is the diagonal tile if causal
};

// 2^eQ of a row with exponent e; 1 of a lost one, and of unscaled ones, whose exponents are only bounds.
__device__ __forceinline__ float row_scale(float e) {
  return E4M3 && e == e ? formats::decode_e8m0(uint32_t(int(e) + 127)) : 1.0f;
}

// The row of h = 0, and whether it is in the first half of its query tile; computed anew where they are used.
__device__ __forceinline__ int row_of_thread() {
  const uint32_t thread = ptx::thread_index() - 128;
  return int(thread / 32 * 16 + thread % 32 / 4);
}
__device__ __forceinline__ bool in_first_half(const Work& work) { return ptx::thread_index() < 256 || work.shift > 0; }

// What `measure` leaves: scores of rows or keys that are not like most. Hides keys; `top`: m of the tile. Scores that
// are hidden from a whole half of the query tile stay as they are.
__device__ __forceinline__ void measure_apart(State& t, const View& view, const float* factors, float (&top)[2]) {
  const bool slow = view.work.slow, diagonal = view.causal && view.last;
  const int row = row_of_thread();
  const int seen = row - view.work.shift;
  const int last[2] = {diagonal ? seen : layout::TILE, diagonal ? seen + 8 : layout::TILE};
  float largest[2];
  if (slow) {
    const float of_row[2] = {row_scale(view.q_exponents[row]), row_scale(view.q_exponents[row + 8])};
    hopper::saturate_scores(t.s, factors, last, of_row, t.rows);
    hopper::find_largest<64>(t.s, largest);
  } else if (diagonal && in_first_half(view.work)) {
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
  bool high = slow;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = slow ? hopper::ceil_slow(largest[h], t.rows.c[h]) : hopper::ceil_product(largest[h], t.rows.c[h]);
    high |= fmaxf(t.rows.top[h], top[h]) >= hopper::BITS_TOP;
  }
  if (ptx::vote_any(high)) t.rows.flags |= hopper::SLOW;
}

// From S, which has arrived, to scaled scores and M. Whether M grows, in any row of the warp; `before`: what it was.
__device__ __forceinline__ bool measure(State& t, const View& view, const hopper::Factors& of_keys,
                                        const float* factors, float (&before)[2]) {
  hopper::scale_scores(t.s, of_keys);
  float largest[2], top[2];
  hopper::find_largest_bits(t.s, largest);
  bool usual = !(t.rows.flags & hopper::SLOW) && !view.last;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    top[h] = hopper::ceil_product(largest[h], t.rows.c[h]);
    usual &= (largest[h] >= 0.0f) | ((t.rows.top[h] >= 0.0f) & (largest[h] < 0.0f));
    usual &= !(top[h] >= hopper::BITS_TOP);
  }
  if (ptx::vote_any(!usual)) measure_apart(t, view, factors, top);
  bool grown = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    before[h] = t.rows.top[h];
    t.rows.top[h] = fmaxf(before[h], top[h]);
    grown |= t.rows.top[h] > before[h];
  }
  return ptx::vote_any(grown);
}

// O and l to units of the new M.
__device__ __forceinline__ void rescale(State& t, const float (&before)[2]) {
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float step = __fsub_rn(before[h], t.rows.top[h]);
    factor[h] = step >= -126.0f ? hopper::exp2_integer(step) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < O_REGISTERS; ++i) t.o[i] = __fmul_rn(t.o[i], factor[i / 2 % 2]);
}

// One half of P as operand A.
template <int HALF>
__device__ __forceinline__ void make_half(State& t, const View& view) {
  uint32_t* const a = t.a + 16 * HALF;
  const float* const s = t.s + 32 * HALF;
  if (HALF == 1 && view.causal && view.last && in_first_half(view.work)) {  // every key is hidden
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i] = 0;
  } else if (t.rows.flags & hopper::SLOW) {
    hopper::make_pairs_slow<FRACTION_BITS, 8>(a, s, t.rows);
  } else {
    hopper::make_pairs<FRACTION_BITS, 8>(a, s, t.rows);
  }
}

// Q's rows of this warpgroup, in a stage of query tiles, as a low word.
__device__ __forceinline__ uint32_t low_word_of_queries(const Self& self, uint32_t stage) {
  const uint32_t slots = Q_SLOT[0] + stage * (Q_SLOT[1] - Q_SLOT[0]);
  return low_word(self.shared) - slots * SLOT_PIECES + self.group * 64 * WIDTH / 16;
}

// S of the first key tile of a query tile that has arrived, from where the ring is.
__device__ __forceinline__ void start_item(State& t, const Self& self, const Work& work, uint32_t stage, KvRing& kv) {
  advance(kv, uniform(work.shift > 0));  // over the first head's
  wait(self, K_FULL, kv.stage, kv.phase);
  start_scores(self, t.s, uniform(low_word_of_queries(self, stage)), low_word_of_keys(self.shared, uniform(kv.stage)));
}

// Note [Next item]
// ~~~~~~~~~~~~~~~~
// S of the next query tile is started before this one's last product has ended, so that it is there when O has been
// divided and stored. Not if this warpgroup has no rows in it: then it must first give back what it holds of this one.
// What it waits for here, no warpgroup holds back that waits itself: work and Q of the next item came when the last but
// one was given back, and its first keys take the place of keys that are read no more.

// All key tiles of a query tile, the S of the first of which is under way; the ring follows. Whether S of the next
// query tile, whose place in the ring is `next_item`, is under way then.
__device__ __forceinline__ bool add_tiles(State& t, Shared& shared, KvRing& kv, uint32_t q, View view, const Self& self,
                                          const WorkRing& next_item) {
  hopper::Factors of_keys;
  hopper::load_factors(of_keys, shared.factors[kv.stage]);  // in flight while S is
  ptx::wgmma_wait_group<0>();
  keep_all(t.s);
  uint32_t values, held = 0;  // the stage of V whose product is under way
  bool first = true;
#pragma unroll 1
  for (int left = uniform(view.work.keys) - 1;; --left) {
    view.last = left == 0;
    KvRing next = kv;
    advance(next, view.heads);
    // Asked early, as the answers take a while.
    values = low_word_of_values(self.shared, uniform(kv.stage));
    const bool k_ready = ptx::mbarrier_test_wait_parity(barrier(self.shared, K_FULL, next.stage), next.phase);
    const bool v_ready = ptx::mbarrier_test_wait_parity(barrier(self.shared, V_FULL, kv.stage), kv.phase);
    float before[2];
    const bool grown = measure(t, view, of_keys, shared.factors[kv.stage], before);
    release(self, K_EMPTY, kv.stage, view.heads);
    make_half<0>(t, view);
    ptx::wgmma_wait_group<0>();  // the second half of the previous P V
    keep_all(t.o);
    keep_all(t.a);
    if (!first) {
      release(self, V_EMPTY, held, view.heads);
      if (grown) rescale(t, before);  // at first O is 0
    }
    first = false;
    held = kv.stage;
    if (!v_ready) wait(self, V_FULL, kv.stage, kv.phase);
    start_values<0>(t.o, t.a, values);
    const uint32_t q_low = uniform(q), k_low = low_word_of_keys(self.shared, uniform(next.stage));
    make_half<1>(t, view);
    of_keys = {};  // so that no register keeps them
    if (view.last) break;
    if (!k_ready) wait(self, K_FULL, next.stage, next.phase);
    hopper::load_factors(of_keys, shared.factors[next.stage]);  // behind products, loads wait for them
    start_scores(self, t.s, q_low, k_low);
    start_values<1>(t.o, t.a, values);
    kv = next;
    ptx::wgmma_wait_group<1>();  // S
    keep_all(t.s);
  }
  start_values<1>(t.o, t.a, values);
  advance(kv, uniform(view.work.heads > 1 && view.work.shift == 0 ? 2 : 1));
  wait(self, WORK_FULL, next_item.stage, next_item.phase);
  const Work& work = shared.work[next_item.stage][self.group];
  const bool started = uniform(work.keys > 0 && int(64 * self.group) < work.rows);
  if (started) {
    wait(self, Q_FULL, next_item.stage, next_item.phase);
    start_item(t, self, work, next_item.stage, kv);
  } else {
    ptx::wgmma_commit_group();  // of nothing
  }
  ptx::wgmma_wait_group<1>();
  keep_all(t.o);
  keep_all(t.a);
  release(self, V_EMPTY, held, view.heads);
  return started;
}
