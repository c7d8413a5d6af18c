// The multiplying role: one thread copies scales to tensor memory and issues every product.
#pragma once

#include "blackwell/backward_layout.cuh"

namespace blackwell::backward {

// dK or dQ of a tile, to be issued when X of the tile is there.
struct Pending {
  bool any = false;
  bool fresh;  // the first tile of a sum
  bool last;   // the last one
  uint32_t stage;
};

struct Multiplier {
  Shared& shared;
  uint32_t tensor;
  int group;
  Ring<WORK_STAGES> works = {};
  Ring<FIXED_STAGES> fixed = {};
  Ring<STREAM_STAGES> scored = {}, graded = {};
  uint32_t tiles = 0;    // whose S has been issued, over all items
  uint32_t waits = 0;    // of `settle`
  Pending pending = {};

  // Note [Backward orderings]
  // ~~~~~~~~~~~~~~~~~~~~~~~~~
  // PTX promises the order of two products with the same accumulator, and of a scale copy before the product behind it.
  // It does not promise that a scale copy waits for an earlier product that reads or writes its columns, nor that a
  // product waits for an earlier one with another accumulator. Relied on here, as by every published kernel:
  //   S of the next tile overwrites P, which dV reads, and the scales of dP and of dV;
  //   dP of the next tile overwrites X, which dK or dQ reads, and the scales of S and of that product;
  //   scales of the next product are copied while an earlier one runs that does not read their columns.
  // The first two are orders that the chip's one queue of products gives. A STRICT build waits for all that has been
  // issued before it copies scales.
  __device__ __forceinline__ void settle() {
    if constexpr (WAIT_ALWAYS) {
      ptx::tcgen05_commit(at(&shared.settled));
      wait(shared.settled, waits++ & 1);
      ptx::tcgen05_fence_after_thread_sync();
    }
  }

  __device__ __forceinline__ void copy_scales(uint32_t column, const uint8_t* from) {
    ptx::tcgen05_cp_32x128b_warpx4(tensor + column, describe_scales(at(from)));
  }

  // S = A B^T of the owner's operand and the one that streams by.
  __device__ __forceinline__ void multiply_scores(const Fixed& a, const ScoreStage& b) {
    settle();
#pragma unroll
    for (int u = 0; u < SCORE_SCALE_TILES; ++u) {
      copy_scales(SCORE_SCALES_A + 4 * u, a.score_scales + u * SCALES);
      copy_scales(SCORE_SCALES_B + 4 * u, b.scales + u * SCALES);
    }
    const uint64_t da = describe_operand<SCORE_ROW>(at(a.score)), db = describe_operand<SCORE_ROW>(at(b.payload));
    const uint32_t d = tensor + S_COLUMN, sa = tensor + SCORE_SCALES_A, sb = tensor + SCORE_SCALES_B;
#pragma unroll
    for (int step = 0; step < SCORE_STEPS; ++step) {
      const uint64_t along = step * STEP_BYTES >> 4;
      if constexpr (NVFP4) {
        ptx::tcgen05_mma_mxf4nvf4_ss(d, da + along, db + along, SCORE_INSTRUCTION, sa + 4 * step, sb + 4 * step, step > 0);
      } else {
        ptx::tcgen05_mma_mxf8f6f4_ss(d, da + along, db + along, SCORE_INSTRUCTION | scale_ids(step), sa, sb, step > 0);
      }
    }
    ptx::tcgen05_commit(at(&shared.s_full));
  }

  // dP = A B^T, likewise.
  __device__ __forceinline__ void multiply_gradients(const Fixed& a, int copy, const GradientStage& b) {
    settle();
    copy_scales(GRADIENT_SCALES, a.gradient_scales[copy]);
    copy_scales(GRADIENT_SCALES + 4, b.scales);
    const uint64_t da = describe_operand<D>(at(a.gradient[copy])), db = describe_operand<D>(at(b.payload));
#pragma unroll
    for (int step = 0; step < D / STEP_BYTES; ++step) {
      const uint64_t along = step * STEP_BYTES >> 4;
      ptx::tcgen05_mma_mxf8f6f4_ss(tensor + G_COLUMN, da + along, db + along, GRADIENT_INSTRUCTION | scale_ids(step),
                                   tensor + GRADIENT_SCALES, tensor + GRADIENT_SCALES + 4, step > 0);
    }
    ptx::tcgen05_commit(at(&shared.g_full));
  }

  // `to` += A B over 128 tokens: A in tensor memory, the blocks of each half together; B read MN-major, from the bytes
  // that other products read K-major: Note [One payload, two majors] of flamia.reference.layout.
  __device__ __forceinline__ void multiply_tokens(uint32_t to, uint32_t a, const uint8_t* b, uint32_t scales, bool fresh) {
    const uint64_t db = describe_operand<D>(at(b));
#pragma unroll
    for (int step = 0; step < VALUE_STEPS; ++step) {
      const uint32_t words = tensor + a + HALF * (step / 2) + BLOCK_WORDS * (step % 2);
      ptx::tcgen05_mma_mxf8f6f4_ts(tensor + to, words, db + (step * STEP_BYTES * D >> 4), VALUE_INSTRUCTION | scale_ids(step),
                                   tensor + scales, tensor + scales + 4, !fresh || step > 0);
    }
  }

  // dK or dQ of the tile before.
  __device__ __forceinline__ void multiply_pending() {
    if (!pending.any) return;
    wait(shared.x_ready, tiles_x++ & 1);
    ptx::tcgen05_fence_after_thread_sync();
    settle();
    copy_scales(X_SCALES, shared.x_scales);
    copy_scales(X_SCALES + 4, shared.one_scales);
    multiply_tokens(KEYS ? SECOND_COLUMN : FIRST_COLUMN, G_COLUMN, shared.scores[pending.stage].payload + TOKENS_AT, X_SCALES,
                    pending.fresh);
    ptx::tcgen05_commit(at(&shared.score_empty[pending.stage]));
    if (pending.last) ptx::tcgen05_commit(at(&shared.sums_full));
    pending.any = false;
  }
  uint32_t tiles_x = 0;

  // Note [Order of backward products]
  // ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
  // S(n) | dK(n - 1) | dP(n) | dV(n) | S(n + 1) ..: S(n + 1) runs while X(n) is computed, dP(n + 1) while P(n + 1) is,
  // so that the warps that compute find their numbers ready. The order runs on over heads and items. A new sum
  // overwrites the one before: its first product waits for numbers of warps that have read that one first.
  __device__ __forceinline__ void multiply_tile(const Fixed& a, int copy, bool first, bool last) {
    const uint32_t parity = tiles & 1;
    const ScoreStage& score = shared.scores[scored.stage];
    const GradientStage& gradient = shared.gradients[graded.stage];
    wait(shared.score_full[scored.stage], scored.phase);
    wait(shared.g_read, parity ^ 1);
    ptx::tcgen05_fence_after_thread_sync();
    multiply_scores(a, score);
    multiply_pending();
    wait(shared.gradient_full[graded.stage], graded.phase);
    wait(shared.s_read, parity);
    ptx::tcgen05_fence_after_thread_sync();
    multiply_gradients(a, copy, gradient);
    if constexpr (KEYS) {
      wait(shared.p_ready, parity);
      ptx::tcgen05_fence_after_thread_sync();
      settle();
      copy_scales(VALUE_SCALES, shared.p_scales);
      copy_scales(VALUE_SCALES + 4, gradient.token_scales);
      multiply_tokens(FIRST_COLUMN, S_COLUMN, gradient.payload, VALUE_SCALES, first);
    }
    ptx::tcgen05_commit(at(&shared.gradient_empty[graded.stage]));
    pending = {true, first, last, scored.stage};
    scored.advance();
    graded.advance();
    ++tiles;
  }

  __device__ __forceinline__ void run() {
    for (;; works.advance()) {
      wait(shared.work_full[works.stage], works.phase);
      const Work work = shared.work[works.stage];
      ptx::mbarrier_arrive(at(&shared.work_empty[works.stage]));
      if (work.tiles == 0) break;
      wait(shared.fixed_full[fixed.stage], fixed.phase);
      for (int g = 0; g < (KEYS ? group : 1); ++g) {
        for (int j = 0; j < work.tiles; ++j) {
          multiply_tile(shared.fixed[fixed.stage], KEYS && j == work.diagonal ? 1 : 0, j == 0, j == work.tiles - 1);
        }
      }
      ptx::tcgen05_commit(at(&shared.fixed_empty[fixed.stage]));
      fixed.advance();
    }
    multiply_pending();
  }
};

}  // namespace blackwell::backward
