// The computing role: two warpgroups, each for one half of a tile's columns; a thread owns a row. From scores to P,
// from dP to X, and the gradients' way out.
#pragma once

#include "blackwell/backward_numbers.cuh"
#include "blackwell/backward_params.cuh"
#include "blackwell/backward_store.cuh"

namespace blackwell::backward {

// Where a thread stands.
struct Place {
  int half = threadIdx.x / 128;
  int w = threadIdx.x / 32 % 4;
  int lane = threadIdx.x % 32;
  int row = threadIdx.x % 128;
  int kept = layout::payload_offset<TILE>(row, TILE / 2 * half);  // of its first block in a stored tile of X
};

// A tile that streams by, for a thread.
struct Tile {
  const Work& work;
  const Columns& columns;
  int g, j;      // which head of the group, which tile
  int bound;         // the row sees columns from here on (keys), or up to here (queries)
  bool plain;        // all rows see all columns, and none is unusual
  uint32_t unusual;  // whether a row or column is outside Note [Fast tiles]
  float reach;       // the largest |m|
  __device__ __forceinline__ int of_block(int block) const { return bound - BLOCK * block; }
};

__device__ __forceinline__ int bound_of(const Work& work, int j, int row) {
  if (j == work.diagonal) return row;
  if constexpr (KEYS) return row < work.rows || work.diagonal >= 0 ? 0 : TILE;
  return j == work.tiles - 1 ? work.columns - 1 : TILE - 1;
}
__device__ __forceinline__ bool is_whole(const Work& work, int j) {
  if (j == work.diagonal) return false;
  return KEYS ? work.rows == TILE || work.diagonal >= 0 : j != work.tiles - 1 || work.columns == TILE;
}
// Of a block, by all rows of a warp.
__device__ __forceinline__ bool sees_nothing(int bound) { return !ptx::vote_any(KEYS ? bound < BLOCK : bound >= 0); }

// Note [Two blocks in line]
// ~~~~~~~~~~~~~~~~~~~~~~~~~
// A thread's two blocks of a whole tile follow each other without a loop, so that addresses are constants; one of them
// that needs the operations of the reference leaves the line, and comes back. Tiles that are seen in part go through a
// loop of their own.

__device__ __forceinline__ Row read_row(const BackwardParams& p, const Work& work, int row) {
  const int64_t where = int64_t(work.slot) * TILE + row;
  Row out;
  out.exponent = (KEYS ? p.k_exponents : p.q_exponents)[where];
  out.power = power_of(out.exponent);
  out.factor = __fmul_rn(p.softmax_scale, out.power);
  out.unusual = !is_usual_exponent(out.exponent);
  if constexpr (!KEYS) {
    out.top = p.top[where];
    out.shift = shift_of(out.top);
    out.delta = p.delta[where];
    out.reach = reach_of(out.top);
    out.unusual |= !is_usual_top(out.top);
  }
  return out;
}

// Counts of barrier phases.
struct Progress {
  uint32_t tiles = 0;
  uint32_t sums = 0;
};

// Where this thread keeps X of a pair of tiles: codes of its first block, and scales. By Note [Payload tile] a block is
// 32 bytes and the swizzle an exclusive or, and `p.x` is at a multiple of 64: so the address of the other pieces is one
// exclusive or away. `any`: whether X is kept.
struct Kept {
  uint64_t codes = 0;
  uint8_t* scales = nullptr;
  uint32_t any = 0;
  __device__ __forceinline__ void advance(int pairs) {
    codes += int64_t(pairs) * (TILE * TILE);
    scales += int64_t(pairs) * 16;
  }
};

struct Computer {
  const BackwardParams& p;
  Shared& shared;
  uint32_t tensor;  // at this warp's lanes
  Place place = {};
  Progress progress = {};

  // Codes and scale bytes of a block for tests.
  __device__ __forceinline__ void hook(uint8_t* stage, uint8_t* stage_scale, const Tile& t, int block,
                                       const uint32_t (&codes)[BLOCK_WORDS], uint32_t byte) const {
    if constexpr (STAGE_HOOKS) {
      const Work& work = t.work;
      const int64_t owner = KEYS ? (int64_t(work.head) * p.group + t.g) * p.max_tiles + work.tile : work.slot;
      const int64_t pair = owner * p.stage_tiles + t.j;
      uint8_t* const to = stage + (pair * TILE + place.row) * TILE + BLOCK * block;
      ptx::st_global_v4(to, make_uint4(codes[0], codes[1], codes[2], codes[3]));
      ptx::st_global_v4(to + 16, make_uint4(codes[4], codes[5], codes[6], codes[7]));
      if (place.lane == 0) stage_scale[(pair * 4 + place.w) * 4 + block] = uint8_t(byte);
    }
  }

  __device__ __forceinline__ void store_scales(uint8_t* scales, uint32_t bytes) const {
    *reinterpret_cast<uint16_t*>(scales + 16 * place.lane + 4 * place.w + 2 * place.half) = uint16_t(bytes);
  }

  // Where X of the first tile that a head streams lies in `p.x`: Note [Stored X] of dq.cu.
  __device__ __forceinline__ int64_t first_pair(const Work& work, int g) const {
    const int key = work.tile - work.base, query = work.diagonal < 0 ? 0 : key;
    const int64_t head = int64_t(work.head - p.first_head) * p.group + g;
    return head * p.pairs + pair_of(p.causal, work.pair, work.count, query, key);
  }

  __device__ __forceinline__ Kept first_kept(const Work& work, int g) const {
    const int64_t pair = first_pair(work, g);
    Kept to;
    to.codes = reinterpret_cast<uint64_t>(p.x) + pair * (TILE * TILE) + place.kept;
    to.scales = p.x_scales + pair * 16 + 4 * place.w + 2 * place.half;
    to.any = p.x != nullptr;
    ptx::keep(to.any);
    return to;
  }

  // X of block i of this thread's two to global memory, in the order in which a product reads it from shared memory.
  __device__ __forceinline__ void keep_x(const Kept& to, int i, const uint32_t (&codes)[BLOCK_WORDS]) const {
    if (!KEYS || !to.any) return;
    const uint64_t at = to.codes ^ uint64_t(BLOCK * i);
    ptx::st_global_v4(reinterpret_cast<void*>(at), make_uint4(codes[0], codes[1], codes[2], codes[3]));
    ptx::st_global_v4(reinterpret_cast<void*>(at ^ 16), make_uint4(codes[4], codes[5], codes[6], codes[7]));
  }
  __device__ __forceinline__ void keep_scales(const Kept& to, uint32_t bytes) const {
    if (!KEYS || !to.any || place.lane != 0) return;
    *reinterpret_cast<uint16_t*>(to.scales) = uint16_t(bytes);
  }

  // Scores of block i of this thread's two.
  __device__ __forceinline__ void read_scores(float (&s)[BLOCK], int i) const {
    ptx::tcgen05_ld_x32(s, tensor + S_COLUMN + HALF * place.half + BLOCK * i);
    ptx::tcgen05_wait_ld();
    if (i == 1) arrive_warp_tensor(shared.s_read);
  }
  __device__ __forceinline__ void write_p(int i, const uint32_t (&codes)[BLOCK_WORDS]) const {
    ptx::tcgen05_st_x8(tensor + S_COLUMN + HALF * place.half + BLOCK_WORDS * i, codes);
  }

  // dP of block i, and the codes of its P.
  __device__ __forceinline__ void read_dp(float (&dp)[BLOCK], uint32_t (&codes)[BLOCK_WORDS], int i) const {
    ptx::tcgen05_ld_x32(dp, tensor + G_COLUMN + HALF * place.half + BLOCK * i);
    ptx::tcgen05_ld_x8(codes, tensor + S_COLUMN + HALF * place.half + BLOCK_WORDS * i);
    ptx::tcgen05_wait_ld();
    if (i == 1) arrive_warp_tensor(shared.g_read);
  }
  __device__ __forceinline__ void write_x(int i, const uint32_t (&codes)[BLOCK_WORDS], const Kept& to) const {
    ptx::tcgen05_st_x8(tensor + G_COLUMN + HALF * place.half + BLOCK_WORDS * i, codes);
    keep_x(to, i, codes);
  }

  // From S to P, in place; returns the scale bytes of the two blocks.
  __device__ __forceinline__ uint32_t compute_p(const Tile& t, const Row& row, const Constants& constants) {
    uint32_t bytes = 0, codes[BLOCK_WORDS], byte;
    float s[BLOCK];
    const auto write = [&](int i) {
      write_p(i, codes);
      bytes |= byte << 8 * i;
      hook(p.stage_p, p.stage_p_scale, t, 2 * place.half + i, codes, byte);
    };
    if (t.plain) {  // Note [Two blocks in line]
      const int first = BLOCK * 2 * place.half;
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        bool fast = true;
        if (i == 0) {
          read_scores(s, 0);
          fast = probabilities_fast<false>(codes, byte, s, t.columns, first, row, 0, constants, t.reach);
          if (fast) write(0);
        }
        if (fast) {
          i = 1;
          read_scores(s, 1);
          if (probabilities_fast<false>(codes, byte, s, t.columns, first + BLOCK, row, 0, constants, t.reach)) {
            write(1);
            break;
          }
        }
        byte = probabilities_slow(codes, s, t.columns, first + BLOCK * i, row, t.bound - (first + BLOCK * i), constants);
        write(i);
      }
      return bytes;
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int block = 2 * place.half + i, bound = t.of_block(block);
      read_scores(s, i);
      if (sees_nothing(bound)) {
        byte = 127 - 8;
#pragma unroll
        for (int k = 0; k < BLOCK_WORDS; ++k) codes[k] = 0;
      } else if (t.unusual ||
                 !probabilities_fast<true>(codes, byte, s, t.columns, BLOCK * block, row, bound, constants, t.reach)) {
        byte = probabilities_slow(codes, s, t.columns, BLOCK * block, row, bound, constants);
      }
      write(i);
    }
    return bytes;
  }

  // From dP to X, in place; returns the scale bytes.
  __device__ __forceinline__ uint32_t compute_x(const Tile& t, const Row& row, const Constants& constants, uint32_t p_bytes,
                                                const Kept& to) {
    uint32_t bytes = 0, codes[BLOCK_WORDS], codes_p[BLOCK_WORDS], byte;
    float dp[BLOCK];
    const auto write = [&](int i) {
      write_x(i, codes, to);
      bytes |= byte << 8 * i;
      hook(p.stage_x, p.stage_x_scale, t, 2 * place.half + i, codes, byte);
    };
    if (t.plain) {
      const int first = BLOCK * 2 * place.half;
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        bool fast = true;
        if (i == 0) {
          read_dp(dp, codes_p, 0);
          fast = gradients_fast(codes, byte, dp, codes_p, p_bytes & 0xFF, t.columns, first, row);
          if (fast) write(0);
        }
        if (fast) {
          i = 1;
          read_dp(dp, codes_p, 1);
          if (gradients_fast(codes, byte, dp, codes_p, p_bytes >> 8, t.columns, first + BLOCK, row)) {
            write(1);
            break;
          }
        }
        byte = gradients_slow(codes, dp, codes_p, p_bytes >> 8 * i & 0xFF, t.columns, first + BLOCK * i, row,
                              t.bound - (first + BLOCK * i), constants);
        write(i);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const int block = 2 * place.half + i, bound = t.of_block(block);
        const uint32_t p_byte = p_bytes >> 8 * i & 0xFF;
        read_dp(dp, codes_p, i);
        if (sees_nothing(bound)) {
          byte = 0;
#pragma unroll
          for (int k = 0; k < BLOCK_WORDS; ++k) codes[k] = 0;
        } else if (t.unusual || !gradients_fast(codes, byte, dp, codes_p, p_byte, t.columns, BLOCK * block, row)) {
          byte = gradients_slow(codes, dp, codes_p, p_byte, t.columns, BLOCK * block, row, bound, constants);
        }
        write(i);
      }
    }
    keep_scales(to, bytes);
    return bytes;
  }

  __device__ __forceinline__ void compute_tile(const Work& work, int g, int j, const Row& row, const Constants& constants,
                                               const Kept& to) {
    static_assert(COLUMN_STAGES == 2, "the tile's number tells the place of its columns, and the round");
    const uint32_t tile = progress.tiles++, parity = tile & 1, stage = parity;
    wait(shared.columns_full[stage], tile >> 1 & 1);
    const Columns& columns = shared.columns[stage];
    const auto summary = columns.summary;
    const uint32_t unusual = row.unusual | summary.unusual[0] | summary.unusual[1];
    const float reach = KEYS ? fmaxf(summary.reach[0], summary.reach[1]) : row.reach;
    const Tile t = {work, columns, g, j, bound_of(work, j, place.row), unusual == 0 && is_whole(work, j), unusual, reach};

    wait(shared.s_full, parity);
    ptx::tcgen05_fence_after_thread_sync();
    const uint32_t p_bytes = compute_p(t, row, constants);
    if constexpr (KEYS) {
      store_scales(shared.p_scales, p_bytes);
      ptx::fence_proxy_async();
      ptx::tcgen05_wait_st();
      arrive_warp_tensor(shared.p_ready);
    } else {
      ptx::tcgen05_wait_st();
    }

    wait(shared.g_full, parity);
    ptx::tcgen05_fence_after_thread_sync();
    const uint32_t x_bytes = compute_x(t, row, constants, p_bytes, to);
    store_scales(shared.x_scales, x_bytes);
    ptx::fence_proxy_async();
    ptx::tcgen05_wait_st();
    arrive_warp_tensor(shared.x_ready);
    arrive_warp(shared.columns_empty[stage]);
  }

  // Columns of a sum, times 2^-e, to the gradient. The owner of keys: warpgroup 0 takes dV, 1 takes dK; the heads of a
  // group are summed in ascending order in `totals`. The owner of queries: each half of dQ.
  __device__ __forceinline__ void store_sums(const Work& work, int g, const Row& row) {
    const bool keys_second = KEYS && place.half == 1;
    const int columns = KEYS ? D : D / 2, first = KEYS ? 0 : columns * place.half;
    const uint32_t from = tensor + (keys_second ? SECOND_COLUMN : FIRST_COLUMN) + first;
    const float undo = KEYS && !keys_second ? 1.0f : power_of(-row.exponent);
    const Gradient& to = keys_second ? p.second : p.first;
    const int64_t token = int64_t(p.tiles[work.tile].start) + place.row;
    const int size = p.element == 2 ? 4 : 2;
    uint8_t* const out = to.data + token * to.token_stride + work.head * to.head_stride;
    const bool last = !KEYS || g == p.group - 1, used = place.row < work.rows;

    wait(shared.sums_full, progress.sums++ & 1);
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll 1
    for (int c = 0; c < columns; c += 16) {
      uint32_t words[16];
      ptx::tcgen05_ld_x16(words, from + c);
      ptx::tcgen05_wait_ld();
      float x[16];
#pragma unroll
      for (int k = 0; k < 16; ++k) x[k] = __fmul_rn(__uint_as_float(words[k]), undo);
      if (KEYS && p.group > 1) {
#pragma unroll
        for (int k = 0; k < 16; k += 4) {
          float* const total = p.totals + (((int64_t(blockIdx.x) * 2 + place.half) * (D / 4) + (c + k) / 4) * TILE + place.row) * 4;
          if (g > 0) {
            const uint4 y = ptx::ld_global_v4(total);
            x[k] = __fadd_rn(__uint_as_float(y.x), x[k]);
            x[k + 1] = __fadd_rn(__uint_as_float(y.y), x[k + 1]);
            x[k + 2] = __fadd_rn(__uint_as_float(y.z), x[k + 2]);
            x[k + 3] = __fadd_rn(__uint_as_float(y.w), x[k + 3]);
          }
          if (!last) {
            ptx::st_global_v4(total, make_uint4(__float_as_uint(x[k]), __float_as_uint(x[k + 1]), __float_as_uint(x[k + 2]),
                                                __float_as_uint(x[k + 3])));
          }
        }
      }
      if (last && used) store_part(out + (first + c) * size, x, p.element);
    }
  }

  __device__ __forceinline__ void run() {
    const Constants constants = {p.c, p.largest_score, p.score_factor, p.softmax_scale, p.usual != 0};
    Ring<WORK_STAGES> works;
    for (;; works.advance()) {
      wait(shared.work_full[works.stage], works.phase);
      const Work work = shared.work[works.stage];
      arrive_warp(shared.work_empty[works.stage]);
      if (work.tiles == 0) break;
      Row row = read_row(p, work, place.row);
      row.unusual = !constants.usual || ptx::vote_any(row.unusual);
      row.reach = __uint_as_float(ptx::redux_max_u32(__float_as_uint(row.reach)));
      for (int g = 0; g < (KEYS ? p.group : 1); ++g) {
        Kept to = KEYS ? first_kept(work, g) : Kept{};
        int step = p.causal ? work.tile - work.base + 1 : work.count;  // to the next query tile's
        const int more = p.causal ? 1 : 0;
#pragma unroll 1
        for (int j = 0; j < work.tiles; ++j) {
          compute_tile(work, g, j, row, constants, to);
          to.advance(step);
          step += more;
        }
        store_sums(work, g, row);
      }
    }
  }
};

}  // namespace blackwell::backward
