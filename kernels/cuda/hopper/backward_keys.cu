// dK and dV, and X for dQ: Note [Two products]. A CTA owns 128 keys of one KV head and walks the query tiles that see
// them, head after head of the group, in steps of 64 queries. Everything is transposed, S^T = K Q^T and dP^T = V dO^T, so
// that P^T and X^T are A operands as they come; a consumer warpgroup has 64 of the keys.
//
// dP^T is under way while the second half of P^T is made, dV and S^T of the next step under X^T, dK under the first half
// of the next P^T, half of dV between; the two warpgroups run freely and fill each other's gaps.
#include "hopper/backward_fast.cuh"
#include "hopper/backward_load.cuh"
#include "hopper/backward_rows.cuh"
#include "hopper/backward_slow.cuh"

using namespace backward;

extern "C" __constant__ const int backward_keys_shared_bytes = sizeof(Shared);

// ---- consuming -------------------------------------------------------------------------------------------------

// dK or dV of one query head, times `factor`: add the heads before, and store after the last one.
__device__ __forceinline__ void finish(const BackwardParams& p, float (&x)[D / 2], float factor, int g, int part,
                                       const Tokens& out, const Record& r, int row) {
#pragma unroll
  for (int i = 0; i < D / 2; ++i) x[i] = __fmul_rn(factor, x[i]);
  if (p.group > 1) {
    float* const total = p.totals + ((int64_t(blockIdx.x) * 2 + part) * CONSUMERS * (D / 2) + 4 * ptx::thread_index());
    if (g > 0) add_rows(x, total);
    if (g + 1 < p.group) {
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        ptx::st_global_v4(total + i * 4 * CONSUMERS,
                          make_uint4(__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]),
                                     __float_as_uint(x[4 * i + 2]), __float_as_uint(x[4 * i + 3])));
      }
      return;
    }
  }
  store_rows(x, out, r.head, r.start, row, r.rows);
}

__device__ __forceinline__ void consume(const BackwardParams& p, Shared& s) {
  const int warp = uniform(threadIdx.x / 32), group = warp / 4;
  uint32_t lane = threadIdx.x % 32;
  Ring<STAGES> ring;
  float x[32], dp[32], dk[D / 2], dv[D / 2];
  uint32_t a[16], b[16];  // P^T, X^T

  const uint32_t k = ptx::shared_address(s.operands.k) + group * STEP * WIDTH;
  const auto wait_full = [&]() { wait(ptx::shared_address(&s.full[ring.stage]), ring.phase); };
  const auto multiply_scores = [&](int stage) {
    forget_all(x);
    ptx::wgmma_fence();
    multiply_channels(x, k, ptx::shared_address(s.operands.stage[0].q), stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
  };
  const auto multiply_values = [&](int stage) {
    forget_all(dp);
    ptx::wgmma_fence();
    multiply_channels(dp, k + TILE_BYTES, ptx::shared_address(s.operands.stage[0].dout), stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
  };
  const auto wait_widened = [&](uint64_t (&widened)[STAGES], int stage, uint32_t phase) {
    if constexpr (WIDENING) ptx::mbarrier_wait_in_place(ptx::shared_address(&widened[stage]), phase);
  };
  const auto multiply_p = [&](int half, int stage) {  // of 32 queries
    ptx::wgmma_fence();
    const uint32_t b = ptx::shared_address(s.operands.stage[0].dout_wide);
    multiply_tokens<2>(dv, a + 8 * half, b, stage * sizeof(Operands::Stage) + half * 2 * (16 * MN_STEP));
    ptx::wgmma_commit_group();
  };
  const auto multiply_x = [&](int stage) {
    ptx::wgmma_fence();
    multiply_tokens<4>(dk, b, ptx::shared_address(s.operands.stage[0].q_wide), stage * sizeof(Operands::Stage));
    ptx::wgmma_commit_group();
  };
  const auto release = [&](int stage) {
    ptx::bar_warp_sync();
    if (ptx::arrives(ptx::thread_index() % 32)) ptx::mbarrier_arrive(ptx::shared_address(&s.empty[stage]));
  };

  // X^T to shared memory, and from there to where the step says.
  const uint32_t piece = ptx::shared_address(s.x[warp]);
  uint32_t at = stored_place(piece, lane);
  const auto put_x = [&](const uint32_t(&x)[16]) {
    ptx::cp_async_bulk_wait_read();
    ptx::bar_warp_sync();
    ptx::keep(at);
    store_x(at, x);
  };
  // The end of a step whose products are done.
  const auto send_x_and_release = [&](int stage) {
    ptx::fence_proxy_async();
    ptx::bar_warp_sync();
    const uint32_t lane = ptx::thread_index() % 32;
    if (ptx::arrives(lane)) {
      if (lane == 0) ptx::cp_async_bulk_global_shared(s.steps[stage].x + warp * PIECE_BYTES, piece, PIECE_BYTES);
      ptx::mbarrier_arrive(ptx::shared_address(&s.empty[stage]));
    }
    ptx::cp_async_bulk_commit_group();
  };

#pragma unroll 1
  for (uint32_t n = 0;; ++n) {
    wait(ptx::shared_address(&s.owner_full[n % 2]), n / 2 % 2);
    const Owner& owner = s.owner[n % 2];
    if (!uniform(owner.record.valid)) break;
    const KeyColumns& keys = owner.keys[group];
    const uint32_t of_keys = uniform(keys.flags[0] | keys.flags[1]);
    const auto know = [&](int stage) {
      const uint32_t bits = s.steps[stage].bits;
      return of_keys | uniform(s.columns[stage].flags[0] | s.columns[stage].flags[1] | bits);
    };
    const int rows = uniform(owner.record.rows);
    const bool partial = !p.causal && rows < TILE;
    wait(ptx::shared_address(s.k_full), n % 2);
#pragma unroll 1
    for (int g = 0; g < p.group; ++g) {
      bool any = true;
      if (p.causal && group == 1) {  // every query of the first step comes before every key of this warpgroup
        wait_full();
        any = !(uniform(s.steps[ring.stage].bits) & ENDS);
        release(ring.stage);
        ring.advance();
      }
      if (any) {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) {
          dk[i] = dv[i] = 0.0f;
          ptx::keep(dk[i]);  // zeros before the first wgmma, and not where the loop begins
          ptx::keep(dv[i]);
        }
        bool started = false;
        wait_full();
        uint32_t now = know(ring.stage);
        multiply_scores(ring.stage);
        ptx::mbarrier_wait_in_place(ptx::shared_address(s.v_full), n % 2);
        ptx::wgmma_wait_group<0>();
        keep_all(x);
#pragma unroll 1
        while (true) {
          const int stage = ring.stage;
          const QueryColumns& columns = s.columns[stage];
          const Hidden hidden{(now & DIAGONAL) != 0, rows};
          const uint32_t phase = ring.phase;
          ring.advance();
          // S of the last step is made twice: no branch has a product, or a wait for operands.
          const int next = now & ENDS ? stage : int(ring.stage);
          const auto wait_next = [&]() {
            ptx::mbarrier_wait_in_place(ptx::shared_address(&s.full[next]), now & ENDS ? phase : ring.phase);
          };
          uint32_t then;

          const auto finish_before = [&]() {  // dK of the step before is done
            keep_all(b);
            if (started) send_x_and_release(stage == 0 ? STAGES - 1 : stage - 1);
            started = true;
          };
          if (!(now & SLOW)) {
            // ---- P^T -------------------------------------------------------------------------------------------
            ptx::keep(lane);
            const float4* const score = columns.score + lane % 4;
            if (hidden.diagonal || partial) {
              hide_scores(x, Limits(hidden, At::of_thread(s.steps[stage].half)));
            }
            const float2* const of_key = keys.factors + warp % 4 * 16 + lane / 4;
            const float2 f0 = of_key[0], f1 = of_key[8];
            fast_probabilities<0>(a, x, score, f0.x, f1.x);
            uint32_t held[16];
            copy_all<0, 8>(held, a);
            wait_widened(s.dout_widened, stage, phase);
            multiply_p(0, stage);
            ptx::wgmma_wait_group<1>();
            finish_before();
            multiply_values(stage);
            fast_probabilities<1>(a, x, score, f0.x, f1.x);
            copy_all<8, 16>(held, a);
            wait_next();
            multiply_p(1, stage);
            multiply_scores(next);
            then = know(next);
            // ---- X^T -------------------------------------------------------------------------------------------
            ptx::wgmma_wait_group<2>();
            keep_all(dp);
            fast_gradients(b, held, dp, columns.delta + lane % 4, columns.factor, f0.y, f1.y);
          } else {
            ptx::wgmma_wait_group<0>();
            finish_before();
            multiply_values(stage);
            ptx::wgmma_wait_group<0>();
            keep_all(dp);
            const Record& r = owner.record;
            const int64_t q_head = int64_t(r.head) * p.group + g;
            const Meeting m{q_head * p.max_tiles + r.first + s.steps[stage].tile,
                            r.head * p.max_tiles + r.first + r.tile, hidden};
            slow_step(a, b, x, dp, p, m, At::of_thread(s.steps[stage].half));
            wait_next();
            wait_widened(s.dout_widened, stage, phase);
            multiply_p(0, stage);
            multiply_p(1, stage);
            ptx::wgmma_wait_group<0>();
            keep_all(a);
            multiply_scores(next);
            then = know(next);
          }
          put_x(b);
          wait_widened(s.q_widened, stage, phase);
          multiply_x(stage);
          ptx::wgmma_wait_group<1>();  // S of the next step; here, not there: else the assembler serializes all products
          keep_all(x);
          keep_all(a);
          if (now & ENDS) break;
          now = then;
        }
        ptx::wgmma_wait_group<0>();
        keep_all(b);
        send_x_and_release(ring.stage == 0 ? STAGES - 1 : ring.stage - 1);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) {
          ptx::keep(dk[i]);
          ptx::keep(dv[i]);
        }
      }
      if (g == p.group - 1 && ptx::arrives(ptx::thread_index() % 32)) {
        ptx::mbarrier_arrive(ptx::shared_address(s.keys_empty));
      }
      if (any) {
        const Record& r = owner.record;
        const int row = At::of_thread(0).row;
        finish(p, dk, p.softmax_scale, g, 0, p.first, r, row);
        finish(p, dv, 1.0f, g, 1, p.second, r, row);
      }
    }
    ptx::bar_warp_sync();
    if (ptx::arrives(ptx::thread_index() % 32)) ptx::mbarrier_arrive(ptx::shared_address(&s.owner_empty[n % 2]));
  }
  ptx::cp_async_bulk_wait();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_keys(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    init_barriers(s);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = uniform(threadIdx.x / 32);
  if (warp >= CONSUMERS / 32) {
    ptx::setmaxnreg_dec<24>();
    if (warp == CONSUMERS / 32) {
      fetch(p, s);
    } else if constexpr (WIDENING) {
      widen(s);
    }
  } else {
    ptx::setmaxnreg_inc<240>();
    consume(p, s);
  }
}
