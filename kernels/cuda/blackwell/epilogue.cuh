// The epilogue role: a warpgroup divides finished rows of O by l and sends them to the packed output.
#pragma once

#include "blackwell/layout.cuh"
#include "blackwell/params.cuh"
#include "blackwell/pipeline.cuh"
#include "common/formats.cuh"
#include "common/logarithm.cuh"

namespace blackwell {

// 16 columns of a row, rounded to the output's elements.
__device__ __forceinline__ void store_row_part(uint32_t to, const float (&x)[16], int element) {
  if (element == 2) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      ptx::st_shared_v4(to + 4 * i, make_uint4(__float_as_uint(x[i]), __float_as_uint(x[i + 1]),
                                               __float_as_uint(x[i + 2]), __float_as_uint(x[i + 3])));
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; i += 8) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float low = x[i + 2 * k], high = x[i + 2 * k + 1];
      words[k] = element == 1 ? ptx::cvt_rn_f16x2_f32(high, low) : ptx::cvt_rn_bf16x2_f32(high, low);
    }
    ptx::st_shared_v4(to + 2 * i, make_uint4(words[0], words[1], words[2], words[3]));
  }
}

// Rows leave by bulk copies that each thread makes of its own row, so no thread waits for another.
__device__ __forceinline__ void store_tile(const ForwardParams& p, Shared& shared, const Work& work, int i,
                                           uint32_t tensor, uint32_t parity) {
  const int row = threadIdx.x % 128;
  const uint32_t o = tensor + lanes_of_warp(threadIdx.x / 32 % 4) + O_COLUMN + i * D;
  const layout::Tile tile = p.tiles[work.tile + i];
  const bool used = row < tile.rows;
  const int64_t token = int64_t(tile.start) + row;
  const int size = p.element == 2 ? 4 : 2, columns = STAGING_ROW / size;  // that the staging row holds
  uint8_t* const to = p.out + token * p.out_token_stride + work.head * p.out_head_stride;
  const uint32_t staging = at(shared.staging[row]);

  wait(shared.rows_final[i], parity);
  ptx::tcgen05_fence_after_thread_sync();
  const RowStatistics statistics = shared.rows[i][row];
#pragma unroll 1
  for (int first = 0; first < D; first += columns) {
    ptx::cp_async_bulk_wait_group_read();
#pragma unroll 1
    for (int c = 0; c < columns; c += 16) {
      uint32_t words[16];
      ptx::tcgen05_ld_x16(words, o + first + c);
      ptx::tcgen05_wait_ld();
      float x[16];
#pragma unroll
      for (int k = 0; k < 16; ++k) x[k] = __fdiv_rn(__uint_as_float(words[k]), statistics.sum);
      store_row_part(staging + c * size, x, p.element);
    }
    if (first + columns == D) arrive_warp_tensor(shared.o_free[i]);
    ptx::fence_proxy_async();
    if (used) ptx::cp_async_bulk_global_shared(to + first * size, staging, STAGING_ROW);
    ptx::cp_async_bulk_commit_group();
  }
  if (used) {
    const int64_t where = work.head * p.num_tokens + token;
    p.m[where] = statistics.top;
    p.l[where] = statistics.saved;
    p.lse[where] = float(0.6931471805599453 * (double(statistics.top) + logarithm::log2_of(statistics.saved)));
  }
}

__device__ __forceinline__ void epilogue(const ForwardParams& p, Shared& shared, uint32_t tensor) {
  Ring<WORK_STAGES> ring;
  uint32_t parity[QUERY_TILES] = {0, 0};
  for (;; ring.advance()) {
    wait(shared.work_full[ring.stage], ring.phase);
    const Work work = shared.work[ring.stage];
    arrive_warp(shared.work_empty[ring.stage]);
    if (work.tiles == 0) break;
#pragma unroll
    for (int i = 0; i < QUERY_TILES; ++i) {
      if (i < work.tiles) {
        store_tile(p, shared, work, i, tensor, parity[i]);
        parity[i] ^= 1;
      }
    }
  }
  ptx::cp_async_bulk_wait_group();
}

}  // namespace blackwell
