// The multiplying role: one thread copies scales to tensor memory and issues every product.
#pragma once

#include "blackwell/layout.cuh"
#include "blackwell/pipeline.cuh"

namespace blackwell {

// Note [P under the next scores]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// With head_dim 64, S_i of the next key tile is issued right behind O_i += P V and l_i += P 1, whose P and scales it
// overwrites. Operations of one thread on one tensor core are executed in the order of issue, and every published
// kernel relies on that; but PTX 9.0 (9.7.16.6.2) promises it for products of the same accumulator only. A STRICT build
// waits. This is the only such reliance; with head_dim 128 there is none, because l must be read first.

struct Multiplier {
  Shared& shared;
  uint32_t tensor;
  bool causal;
  Ring<WORK_STAGES> works;
  Ring<K_STAGES> k;
  Ring<V_STAGES> v;
  uint32_t scored[QUERY_TILES] = {0, 0};  // score products issued, over all items
  uint32_t taken[QUERY_TILES] = {0, 0};   // items that had this query tile

  __device__ __forceinline__ uint32_t s_column(int i) const { return tensor + i * S_COLUMNS; }

  // S_i = Q_i K^T. `first`, `last`: whether no other product reads this key tile before or after it.
  __device__ __forceinline__ void scores(int i, bool first, bool last, bool starts, bool ends) {
    if (first) wait(shared.k_full[k.stage], k.phase);
    if (starts) wait(shared.q_full[i], taken[i] & 1);
    if constexpr (!L_RESIDENT) {
      wait(shared.l_read[i], scored[i] & 1 ^ 1);  // l is no longer in S_i
    } else if constexpr (WAIT_ALWAYS) {
      wait(shared.pv_done[i], scored[i] & 1 ^ 1);  // otherwise Note [P under the next scores]
    }
    wait(shared.s_read[1 - i], scored[1 - i] & 1 ^ 1);  // S_{1-i} has been read: scales may be parked there
    ptx::tcgen05_fence_after_thread_sync();
    const uint32_t scales_q = s_column(1 - i) + Q_SCALE_COLUMN, scales_k = s_column(1 - i) + K_SCALE_COLUMN;
#pragma unroll
    for (int u = 0; u < SCORE_SCALE_TILES; ++u) {
      ptx::tcgen05_cp_32x128b_warpx4(scales_q + 4 * u, describe_scales(at(shared.q_scales[i]) + u * SCALES));
      ptx::tcgen05_cp_32x128b_warpx4(scales_k + 4 * u, describe_scales(at(shared.k_scales[k.stage]) + u * SCALES));
    }
    const uint64_t a = describe_operand<SCORE_ROW>(at(shared.q[i]));
    const uint64_t b = describe_operand<SCORE_ROW>(at(shared.k[k.stage]));
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; ++step) {
      const uint64_t along = step * STEP_BYTES >> 4;
      if constexpr (NVFP4) {
        ptx::tcgen05_mma_mxf4nvf4_ss(s_column(i), a + along, b + along, SCORE_INSTRUCTION, scales_q + 4 * step,
                                     scales_k + 4 * step, step > 0);
      } else {
        ptx::tcgen05_mma_mxf8f6f4_ss(s_column(i), a + along, b + along, SCORE_INSTRUCTION | scale_ids(step), scales_q,
                                     scales_k, step > 0);
      }
    }
    ptx::tcgen05_commit(at(&shared.s_full[i]));
    if (ends) {
      ptx::tcgen05_commit(at(&shared.q_empty[i]));
      ++taken[i];
    }
    if (last) {
      ptx::tcgen05_commit(at(&shared.k_empty[k.stage]));
      k.advance();
    }
    ++scored[i];
  }

  // O_i += P V and l_i += P 1. `first`, `last` as above, of the stage of V.
  __device__ __forceinline__ void values(int i, bool starts, bool diagonal, bool first, bool last) {
    if (first) wait(shared.v_full[v.stage], v.phase);
    if (starts) wait(shared.o_free[i], taken_o[i]++ & 1 ^ 1);
    wait(shared.p_ready[i], multiplied[i]++ & 1);
    ptx::tcgen05_fence_after_thread_sync();
    const uint32_t s = s_column(i), o = tensor + O_COLUMN + i * D;
    ptx::tcgen05_cp_32x128b_warpx4(s + P_SCALE_COLUMN, describe_scales(at(shared.p_scales[i])));
    if (diagonal) {
      ptx::tcgen05_cp_32x128b_warpx4(s + FOLDED_SCALE_COLUMN, describe_scales(at(shared.folded_scales[i])));
    } else {
      ptx::tcgen05_cp_32x128b_warpx4(s + V_SCALE_COLUMN, describe_scales(at(shared.v_scales[v.stage])));
    }
    const uint32_t p = s + (diagonal ? FOLDED_COLUMN : P_COLUMN);
    const uint32_t scales_p = s + (diagonal ? FOLDED_SCALE_COLUMN : P_SCALE_COLUMN);
    const uint32_t scales_v = s + (diagonal ? ONE_SCALE_COLUMN : V_SCALE_COLUMN);
    const uint64_t b = describe_operand<D>(at(shared.v[v.stage])), ones = describe_operand<128>(at(shared.ones));
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step) {
      ptx::tcgen05_mma_mxf8f6f4_ts(o, p + 8 * step, b + (step * STEP_BYTES * D >> 4),
                                   VALUE_INSTRUCTION | scale_ids(step), scales_p, scales_v, !starts || step > 0);
    }
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step) {
      ptx::tcgen05_mma_mxf8f6f4_ts(tensor + l_column(i), s + P_COLUMN + 8 * step, ones + (step * STEP_BYTES >> 4),
                                   SUM_INSTRUCTION | scale_ids(step), s + P_SCALE_COLUMN, s + ONE_SCALE_COLUMN,
                                   !L_RESIDENT || !starts || step > 0);
    }
    ptx::tcgen05_commit(at(&shared.pv_done[i]));
    if (last) {
      ptx::tcgen05_commit(at(&shared.v_empty[v.stage]));
      v.advance();
    }
  }
  uint32_t multiplied[QUERY_TILES] = {0, 0};  // value products issued, over all items
  uint32_t taken_o[QUERY_TILES] = {0, 0};     // items whose output was started

  // Note [Order of products]
  // ~~~~~~~~~~~~~~~~~~~~~~~~
  // S_0(0) S_1(0) | O_0(0) S_0(1) O_1(0) S_1(1) | O_0(1) S_0(2) O_1(1) S_1(2) | ..: while one query tile's softmax
  // works, the other's products run. Query tile 1, if there is one, sees at least the keys of query tile 0.
  __device__ __forceinline__ void run() {
    for (;; works.advance()) {
      wait(shared.work_full[works.stage], works.phase);
      const Work work = shared.work[works.stage];
      ptx::mbarrier_arrive(at(&shared.work_empty[works.stage]));
      if (work.tiles == 0) break;
      const bool two = work.tiles == 2;
      const int n0 = work.keys[0], n1 = work.keys[1];
      scores(0, true, !two, true, n0 == 1);
      if (two) scores(1, false, true, true, n1 == 1);
      for (int j = 0; j < max(n0, n1); ++j) {
        const bool diagonal0 = causal && j == n0 - 1, shared_values = two && j < n0 && !diagonal0;
        if (j < n0) {
          values(0, j == 0, diagonal0, true, !shared_values);
          if (j + 1 < n0) scores(0, true, !two, false, j + 2 == n0);
        }
        if (j < n1) {
          values(1, j == 0, causal && j == n1 - 1, !shared_values, true);
          if (j + 1 < n1) scores(1, j + 1 >= n0, true, false, j + 2 == n1);
        }
      }
    }
  }
};

}  // namespace blackwell
