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
};

// What its rows see of a tile: columns from `bound` on (keys), or up to `bound` (queries).
struct View {
  int bound;
  __device__ __forceinline__ int of_block(int block) const { return bound - BLOCK * block; }
};

__device__ __forceinline__ View view_of(const Work& work, int j, int row) {
  const bool diagonal = j == work.diagonal;
  if constexpr (KEYS) {
    return {diagonal ? row : row < work.rows || work.diagonal >= 0 ? 0 : TILE};
  } else {
    return {diagonal ? row : j == work.tiles - 1 ? work.columns - 1 : TILE - 1};
  }
}

enum class Sight { ALL, SOME, NONE };

// Of a block by all rows of a warp.
__device__ __forceinline__ Sight sight_of(int bound) {
  const bool all = KEYS ? bound <= 0 : bound >= BLOCK - 1, none = KEYS ? bound >= BLOCK : bound < 0;
  if (!ptx::vote_any(!all)) return Sight::ALL;
  return ptx::vote_any(!none) ? Sight::SOME : Sight::NONE;
}

__device__ __forceinline__ Row read_row(const BackwardParams& p, const Work& work, int row) {
  const int64_t where = int64_t(work.slot) * TILE + row;
  Row out;
  out.exponent = (KEYS ? p.k_exponents : p.q_exponents)[where];
  out.power = power_of(out.exponent);
  out.usual = is_usual_exponent(out.exponent);
  if constexpr (!KEYS) {
    out.top = p.top[where];
    out.shift = shift_of(out.top);
    out.delta = p.delta[where];
    out.reach = reach_of(out.top);
    out.usual &= is_usual_top(out.top);
  }
  return out;
}

// Counts of barrier phases.
struct Progress {
  uint32_t tiles = 0;
  uint32_t sums = 0;
};

struct Computer {
  const BackwardParams& p;
  Shared& shared;
  uint32_t tensor;  // at this warp's lanes
  Place place = {};
  Progress progress = {};
  Ring<COLUMN_STAGES> ring = {};

  // Codes and scale bytes of a block for tests.
  __device__ __forceinline__ void hook(uint8_t* stage, uint8_t* stage_scale, const Work& work, int g, int j, int block,
                                       const uint32_t (&codes)[BLOCK_WORDS], uint32_t byte) const {
    if constexpr (STAGE_HOOKS) {
      const int64_t owner = KEYS ? (int64_t(work.head) * p.group + g) * p.max_tiles + work.tile : work.slot;
      const int64_t pair = owner * p.stage_tiles + j;
      uint8_t* const to = stage + (pair * TILE + place.row) * TILE + BLOCK * block;
      ptx::st_global_v4(to, make_uint4(codes[0], codes[1], codes[2], codes[3]));
      ptx::st_global_v4(to + 16, make_uint4(codes[4], codes[5], codes[6], codes[7]));
      if (place.lane == 0) stage_scale[(pair * 4 + place.w) * 4 + block] = uint8_t(byte);
    }
  }

  __device__ __forceinline__ void store_scales(uint8_t* scales, uint32_t bytes) const {
    *reinterpret_cast<uint16_t*>(scales + 16 * place.lane + 4 * place.w + 2 * place.half) = uint16_t(bytes);
  }

  // X to global memory, in the order in which a product reads it from shared memory: Note [Stored X] of dq.cu.
  __device__ __forceinline__ void keep_x(const Work& work, int g, int j, int block, const uint32_t (&codes)[BLOCK_WORDS],
                                         uint32_t byte) const {
    if (!KEYS || p.x == nullptr) return;
    const int key = work.tile - work.base, query = work.diagonal < 0 ? j : key + j;
    const int64_t head = int64_t(work.head - p.first_head) * p.group + g;
    const int64_t pair = head * p.pairs + pair_of(p.causal, work.base, work.count, query, key);
    uint8_t* const to = p.x + pair * (TILE * TILE);
    ptx::st_global_v4(to + layout::payload_offset<TILE>(place.row, BLOCK * block),
                      make_uint4(codes[0], codes[1], codes[2], codes[3]));
    ptx::st_global_v4(to + layout::payload_offset<TILE>(place.row, BLOCK * block + 16),
                      make_uint4(codes[4], codes[5], codes[6], codes[7]));
    if (place.lane == 0) p.x_scales[pair * 16 + 4 * place.w + block] = uint8_t(byte);
  }

  // From S to P, in place; returns the scale bytes of the two blocks.
  __device__ __forceinline__ uint32_t compute_p(const Work& work, int g, int j, const Columns& columns, const Row& row,
                                                const View& view, const Constants& constants, bool unusual) {
    const float reach = fmaxf(columns.reach[0], columns.reach[1]);
    uint32_t bytes = 0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int block = 2 * place.half + i, bound = view.of_block(block);
      float s[BLOCK];
      ptx::tcgen05_ld_x32(s, tensor + S_COLUMN + BLOCK * block);
      ptx::tcgen05_wait_ld();
      if (i == 1) arrive_warp_tensor(shared.s_read);
      uint32_t codes[BLOCK_WORDS], byte;
      switch (sight_of(bound)) {
        case Sight::ALL:
          byte = probabilities<false>(codes, s, columns, BLOCK * block, row, bound, constants, unusual, reach);
          break;
        case Sight::SOME:
          byte = probabilities<true>(codes, s, columns, BLOCK * block, row, bound, constants, unusual, reach);
          break;
        default:
          byte = 127 - 8;
#pragma unroll
          for (int k = 0; k < BLOCK_WORDS; ++k) codes[k] = 0;
      }
      bytes |= byte << 8 * i;
      ptx::tcgen05_st_x8(tensor + S_COLUMN + HALF * place.half + BLOCK_WORDS * i, codes);
      hook(p.stage_p, p.stage_p_scale, work, g, j, block, codes, byte);
    }
    return bytes;
  }

  // From dP to X, in place; returns the scale bytes.
  __device__ __forceinline__ uint32_t compute_x(const Work& work, int g, int j, const Columns& columns, const Row& row,
                                                const View& view, const Constants& constants, bool unusual, uint32_t p_bytes) {
    uint32_t bytes = 0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int block = 2 * place.half + i, bound = view.of_block(block);
      float dp[BLOCK];
      uint32_t low[4], high[4];
      ptx::tcgen05_ld_x32(dp, tensor + G_COLUMN + BLOCK * block);
      ptx::tcgen05_ld_x4(low, tensor + S_COLUMN + HALF * place.half + BLOCK_WORDS * i);
      ptx::tcgen05_ld_x4(high, tensor + S_COLUMN + HALF * place.half + BLOCK_WORDS * i + 4);
      ptx::tcgen05_wait_ld();
      if (i == 1) arrive_warp_tensor(shared.g_read);
      const uint32_t codes_p[BLOCK_WORDS] = {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
      uint32_t codes[BLOCK_WORDS], byte = 0;
      if (sight_of(bound) == Sight::NONE) {
#pragma unroll
        for (int k = 0; k < BLOCK_WORDS; ++k) codes[k] = 0;
      } else {
        byte = gradients(codes, dp, codes_p, p_bytes >> 8 * i & 0xFF, columns, BLOCK * block, row, bound, constants, unusual);
      }
      bytes |= byte << 8 * i;
      ptx::tcgen05_st_x8(tensor + G_COLUMN + HALF * place.half + BLOCK_WORDS * i, codes);
      keep_x(work, g, j, block, codes, byte);
      hook(p.stage_x, p.stage_x_scale, work, g, j, block, codes, byte);
    }
    return bytes;
  }

  __device__ __forceinline__ void compute_tile(const Work& work, int g, int j, const Row& row, const Constants& constants) {
    const uint32_t parity = progress.tiles++ & 1;
    const View view = view_of(work, j, place.row);
    wait(shared.columns_full[ring.stage], ring.phase);
    const Columns& columns = shared.columns[ring.stage];
    const bool unusual = !constants.usual || (columns.unusual[0] | columns.unusual[1]) != 0;

    wait(shared.s_full, parity);
    ptx::tcgen05_fence_after_thread_sync();
    const uint32_t p_bytes = compute_p(work, g, j, columns, row, view, constants, unusual);
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
    const uint32_t x_bytes = compute_x(work, g, j, columns, row, view, constants, unusual, p_bytes);
    store_scales(shared.x_scales, x_bytes);
    ptx::fence_proxy_async();
    ptx::tcgen05_wait_st();
    arrive_warp_tensor(shared.x_ready);
    arrive_warp(shared.columns_empty[ring.stage]);
    ring.advance();
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
      const Row row = read_row(p, work, place.row);
      for (int g = 0; g < (KEYS ? p.group : 1); ++g) {
#pragma unroll 1
        for (int j = 0; j < work.tiles; ++j) compute_tile(work, g, j, row, constants);
        store_sums(work, g, row);
      }
    }
  }
};

}  // namespace blackwell::backward
