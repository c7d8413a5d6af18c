// The softmax role: a warpgroup turns the scores of one query tile into P, a key tile at a time; a thread owns a row.
#pragma once

#include "blackwell/params.cuh"
#include "blackwell/chip.cuh"
#include "blackwell/exp2.cuh"
#include "blackwell/pipeline.cuh"

namespace blackwell {

// Note [Row sum]
// ~~~~~~~~~~~~~~
// l += P 1 is a product of its own, with columns of ones, so that it has the bits of the contract and costs the softmax
// warps no addition. With head_dim 128 tensor memory has no room for an accumulator that outlives S (Note [Tensor
// memory map]): between two tiles l lies in a register of the row's thread, is stored beside P, and read back when the
// product is done; only then may S be overwritten.
//
// Note [Reference exponent]
// ~~~~~~~~~~~~~~~~~~~~~~~~~
// The contract holds O and l of a row in units of 2^M, M the running maximum of m_t; multiplying them when M grows is a
// trip through tensor memory. Here they are in units of 2^R, R <= M, and R follows only when M - R > 24 (`SLACK`).
//
// Both have the same bits as long as everything is exact in units of 2^M. A product of two E4M3 codes has an exponent
// of at least -12, so in the units of M that of key tile t has at least -12 + (m_t - 8 - M) + e_t, e_t the smallest
// scale exponent of V in the tile; a tensor core's result is a multiple of 2^-25 times its largest term, and FP32 holds
// multiples of 2^-149. So nothing is rounded, by subnormals or to zero, while
//   M - min_t (m_t + e_t) <= 149 - 25 - 12 - 8 = 104 (`REACH`)
// and nothing overflows in either unit if e_t <= 48: 2^(48 + 9) from V, 2^(24 + 8 - 8) from R and P, 2^31 keys. A row
// that breaks one of the two is from then on rescaled whenever M grows, as the contract says: factors below 2^-126 are
// 0.
constexpr float SLACK = 24.0f, REACH = 104.0f, MAX_V_EXPONENT = 48.0f;

// A row while the key tiles pass. m: M; r: R; l: in units of 2^R, where it is not resident.
struct Row {
  float m = __uint_as_float(0xFF800000u);
  float r = __uint_as_float(0xFF800000u);
  float l = 0.0f;
  float reach = __uint_as_float(0x7F800000u);  // min of m_t + e_t
};

// Smallest and largest exponent of V's four blocks, from their bytes; NaN counts as 128.
__device__ __forceinline__ float reach_of(uint32_t bytes, float top) {
  const uint32_t a = bytes & 0xFF, b = bytes >> 8 & 0xFF, c = bytes >> 16 & 0xFF, d = bytes >> 24;
  const float least = float(int(min(min(a, b), min(c, d))) - 127), most = float(int(max(max(a, b), max(c, d))) - 127);
  return most > MAX_V_EXPONENT ? minus_infinity() : __fadd_rn(top, least);
}

// The number at `from`.
__device__ __forceinline__ float load_float(uint32_t from) {
  uint32_t x = ptx::tcgen05_ld_x1(from);
  ptx::tcgen05_wait_ld();
  ptx::keep(x);  // not as a float before the wait
  return __uint_as_float(x);
}

// O of this thread's row times two powers, one after the other.
__device__ __forceinline__ void rescale(uint32_t o, float first, float second) {
#pragma unroll 1
  for (int i = 0; i < D; i += 32) {
    uint32_t x[32];
    ptx::tcgen05_ld_x32(x, o + i);
    ptx::tcgen05_wait_ld();
#pragma unroll
    for (int j = 0; j < 32; ++j) x[j] = __float_as_uint(__fmul_rn(__fmul_rn(__uint_as_float(x[j]), first), second));
    ptx::tcgen05_st_x32(o + i, x);
  }
  ptx::tcgen05_wait_st();
}

// M takes in m of a tile, and R follows if it must. `started`: O, and l where it is resident, hold something. Returns
// m_t - M.
__device__ __forceinline__ float take_top(Row& row, float top, uint32_t v_bytes, uint32_t o, uint32_t l, bool started) {
  const float before = row.m, after = fmaxf(before, top);
  row.m = after;
  row.reach = fminf(row.reach, reach_of(v_bytes, top));
  const bool lazy = __fsub_rn(after, row.reach) <= REACH && __fsub_rn(after, row.r) <= SLACK;
  const bool follow = after > row.r && !lazy;
  if (ptx::vote_any(follow)) {
    float first = 1.0f, second = 1.0f;
    if (follow) {
      const bool fresh = row.r == minus_infinity();
      const float step = __fsub_rn(before, after);
      first = fresh ? 1.0f : exp2_integer(__fsub_rn(row.r, before));
      second = fresh ? 1.0f : step < -126.0f ? 0.0f : exp2_integer(step);
      row.r = after;
    }
    if (started) {
      if constexpr (L_RESIDENT) {
        const float sum = load_float(l);
        ptx::tcgen05_st_x1(l, __float_as_uint(__fmul_rn(__fmul_rn(sum, first), second)));
      } else {
        row.l = __fmul_rn(__fmul_rn(row.l, first), second);
      }
      rescale(o, first, second);
    }
  }
  return __fsub_rn(top, after);
}

// P becomes zero where the tile's factor is below 2^-127, but for NaN.
__device__ __forceinline__ void drop(uint32_t p, bool dead) {
#pragma unroll 1
  for (int i = 0; i < 32; ++i) {
    const uint32_t codes = ptx::tcgen05_ld_x1(p + i);
    ptx::tcgen05_wait_ld();
    uint32_t kept = 0;
#pragma unroll
    for (int j = 0; j < 32; j += 8) kept |= (codes >> j & 0xFF) == P_NAN ? P_NAN << j : 0;
    ptx::tcgen05_st_x1(p + i, dead ? kept : codes);
  }
  ptx::tcgen05_wait_st();
}

// ---- the diagonal tile -----------------------------------------------------------------------------------------

// Scale bytes of V1 in the diagonal tile as this row sees them: the largest of each block, 0 where it sees none.
// E8M0 bytes are ordered as their exponents, NaN above all.
__device__ __forceinline__ uint32_t visible_exponents(const uint8_t* fold, int w, int lane) {
  const uint4 line = *reinterpret_cast<const uint4*>(fold + 16 * lane);  // tokens lane, lane + 32, ..
  const uint32_t own[layout::BLOCKS] = {line.x & 0xFF, line.y & 0xFF, line.z & 0xFF, line.w & 0xFF};
  uint32_t bytes = 0;
#pragma unroll
  for (int b = 0; b < layout::BLOCKS; ++b) {
    uint32_t largest = own[b];
    if (b < w) {
      largest = ptx::redux_max_u32(largest);
    } else if (b == w) {
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const uint32_t below = ptx::shfl_up(largest, lanes);
        largest = lane >= lanes ? max(largest, below) : largest;
      }
    }
    bytes |= (b <= w ? largest : 0) << 8 * b;
  }
  return bytes;
}

// P' = E4M3(P 2^(e_j - E_b)) of block b, for the columns up to `last`; P in `codes`. Hidden columns hold P = 0.
__device__ __forceinline__ void fold_block(uint32_t (&folded)[8], const uint8_t* fold, uint32_t p, int b,
                                           uint32_t largest) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t codes = ptx::tcgen05_ld_x1(p + 8 * b + i);
    uint32_t exponents[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) exponents[j] = fold[16 * (4 * i + j) + 4 * b];
    ptx::tcgen05_wait_ld();
    float y[4];
    const float2 low = formats::decode_e4m3x2(codes), high = formats::decode_e4m3x2(codes >> 16);
    const float value[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int distance = min(max(int(exponents[j]) - int(largest), -126), 0);
      y[j] = __fmul_rn(value[j], __uint_as_float(uint32_t(distance + 127) << 23));
    }
    folded[i] = formats::encode_e4m3x4(y[0], y[1], y[2], y[3]);
  }
}

// P' and its scales beside P. `below`: m_t - M; `above`: m_t - R.
__device__ __forceinline__ void fold_row(Shared& shared, int i, uint32_t s, int w, int lane, float below, float above,
                                         uint32_t largest) {
  const uint8_t* const fold = shared.fold[i];
  uint32_t word = 0;
#pragma unroll 1
  for (int b = 0; b < layout::BLOCKS; ++b) {
    const uint32_t byte = largest >> 8 * b & 0xFF;
    const bool lost = byte == formats::E8M0_NAN;
    const float e = lost ? not_a_number() : b > w ? minus_infinity() : float(int(byte) - 127);
    uint32_t folded[8];
    fold_block(folded, fold, s + P_COLUMN, b, byte);
    const bool dead = __fadd_rn(__fsub_rn(below, 8.0f), e) < -127.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) folded[k] = dead ? 0 : folded[k];
    ptx::tcgen05_st_x8(s + FOLDED_COLUMN + 8 * b, folded);
    word |= scale_byte(__fadd_rn(__fsub_rn(above, 8.0f), e)) << 8 * b;
  }
  *reinterpret_cast<uint32_t*>(shared.folded_scales[i] + 16 * lane + 4 * w) = word;
}

// ---- the role --------------------------------------------------------------------------------------------------

// P of a tile, from S; returns top. Columns past `last` are hidden.
__device__ __forceinline__ float round_tile(const uint64_t& s_read, uint32_t s, int last, const Constants& g) {
  if (ptx::vote_any(last < 127)) hide(s, last);
  float x[128], largest;
  if constexpr (Chip::LOADS_WITH_MAXIMUM) {
    largest = Chip::load_with_maximum(x, s);
  } else {
#pragma unroll
    for (int i = 0; i < 128; i += 32) ptx::tcgen05_ld_x32(x + i, s + i);
    ptx::tcgen05_wait_ld();
    largest = largest_of(x);
  }
  float top = ceil_product(largest, g.c);
  const bool fast = g.usual && fabsf(top) < MAX_TOP;
  if (!ptx::vote_any(!fast)) {
    arrive_warp_tensor(s_read);
    round_row(s + P_COLUMN, x, top, g);
  } else {
    top = round_slow(s, last, g);
    arrive_warp_tensor(s_read);
  }
  return top;
}

__device__ __forceinline__ void hook_tile(const ForwardParams& p, uint32_t s, int64_t pair, int row, float top) {
  ptx::tcgen05_wait_st();
  uint32_t words[32];
  ptx::tcgen05_ld_x32(words, s + P_COLUMN);
  ptx::tcgen05_wait_ld();
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    ptx::st_global_v4(p.stage_p + (pair * layout::TILE + row) * layout::TILE + 4 * i,
                      make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
  }
  p.stage_top[pair * layout::TILE + row] = top;
}

// One query tile: `i` of its item.
__device__ __forceinline__ void softmax_tile(const ForwardParams& p, Shared& shared, const Work& work, int i,
                                             uint32_t tensor, uint32_t& tiles_seen) {
  const int w = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = threadIdx.x % 128;
  const uint32_t s = tensor + lanes_of_warp(w) + i * S_COLUMNS, o = tensor + lanes_of_warp(w) + O_COLUMN + i * D;
  const uint32_t l = tensor + lanes_of_warp(w) + l_column(i) + L_USED;
  const Constants g = {p.c, p.inverse_c, p.score_factor, p.usual != 0};
  const int keys = i == 0 ? work.keys[0] : work.keys[1];
  uint32_t folded_exponents = 0;
  Row state;
#pragma unroll 1
  for (int j = 0; j < keys; ++j, ++tiles_seen) {
    const uint32_t parity = tiles_seen & 1;
    const bool last_tile = j == keys - 1, diagonal = p.causal && last_tile;
    const uint32_t v_bytes =
        diagonal ? 0 : ptx::ld_global_nc_b32(p.v_scales + int64_t(work.key_slot + j) * SCALES);
    wait(shared.s_full[i], parity);
    if (L_RESIDENT && j > 0) wait(shared.pv_done[i], parity ^ 1);  // done before S was, but its arrival may lag behind
    ptx::tcgen05_fence_after_thread_sync();
    const int last = !last_tile ? 127 : p.causal ? row : work.last_rows - 1;
    const float top = round_tile(shared.s_read[i], s, last, g);
    if (diagonal) folded_exponents = visible_exponents(shared.fold[i], w, lane);
    // Blocks that a row does not see do not count: they take the byte of block 0, which every row sees.
    uint32_t seen = folded_exponents;
    if (diagonal) {
#pragma unroll
      for (int b = 1; b < layout::BLOCKS; ++b) seen |= (b > w ? folded_exponents & 0xFF : 0) << 8 * b;
    }
    const float below = take_top(state, top, diagonal ? seen : v_bytes, o, l, j > 0), above = __fsub_rn(top, state.r);
    const bool dead = __fsub_rn(below, 8.0f) < -127.0f;
    if (ptx::vote_any(dead)) {
      ptx::tcgen05_wait_st();
      drop(s + P_COLUMN, dead);
    }
    const uint32_t sum = __float_as_uint(state.l), one = 0x7F7F7F7Fu;
    const uint32_t beside[8] = {sum, sum, sum, sum, one, one, one, one};
    ptx::tcgen05_st_x8(s + L_IN_S + L_USED, beside);
    const uint32_t byte = scale_byte(__fsub_rn(above, 8.0f));
    *reinterpret_cast<uint32_t*>(shared.p_scales[i] + 16 * lane + 4 * w) = byte * 0x01010101u;
    if (diagonal) {
      ptx::tcgen05_wait_st();
      fold_row(shared, i, s, w, lane, below, above, folded_exponents);
    }
    if constexpr (STAGE_HOOKS) {
      hook_tile(p, s, int64_t(work.query_slot + i) * p.stage_keys + j, row, top);
    }
    ptx::fence_proxy_async();
    ptx::tcgen05_wait_st();
    arrive_warp_tensor(shared.p_ready[i]);

    if (!L_RESIDENT || last_tile) {
      wait(shared.pv_done[i], parity);
      ptx::tcgen05_fence_after_thread_sync();
      state.l = load_float(l);
      if constexpr (!L_RESIDENT) arrive_warp_tensor(shared.l_read[i]);
    }
  }
  const float apart = state.m == minus_infinity() ? 0.0f : __fsub_rn(state.r, state.m);
  shared.rows[i][row] = {state.l, __fmul_rn(state.l, exp2_integer(apart)), state.m};
  arrive_warp_tensor(shared.rows_final[i]);
  arrive_warp(shared.q_empty[i]);
}

__device__ __forceinline__ void softmax(const ForwardParams& p, Shared& shared, uint32_t tensor) {
  const int i = threadIdx.x / 128;
  Ring<WORK_STAGES> ring;
  uint32_t tiles_seen = 0;
  for (;; ring.advance()) {
    wait(shared.work_full[ring.stage], ring.phase);
    const Work work = shared.work[ring.stage];
    arrive_warp(shared.work_empty[ring.stage]);
    if (work.tiles == 0) break;
    if (i < work.tiles) softmax_tile(p, shared, work, i, tensor, tiles_seen);
  }
}

}  // namespace blackwell
