// Attention forward on Hopper: Note [Forward] of flamia.reference.forward under the profile "hopper", bit for bit.
//
// Note [Forward on Hopper]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// A CTA is two producer warps, one of which takes and inspects work items while the other fetches their tiles, and two
// consumer warpgroups of 64 rows each.
// Per key tile, a warpgroup computes S with wgmma (E4M3 codes, or bfloat16), P in registers (hopper/softmax.cuh), and
// adds P V to O with wgmma in bfloat16 (wide copies of V, Note [Wide tile]). l is one more column of that product: 8
// channels of ones lie behind each stage of V (Note [Slots]).
//
// P is made in two halves. P V of the first runs while the second is made; then S of the next tile and P V of the second
// are started together, and scores of the next tile are measured and the first half of its P is made while they run.
// The two warpgroups start S in turns (Note [Turns]). All key tiles go through one loop body: what only some of them
// need is jumped over, because a short document lives on the instruction cache.
//
// The four warps of a warpgroup start each product together, so that what one of them waits for, all wait for. Nothing
// in the loop's path takes longer in one warp than in another but the rescaling of O and l, by exact powers of two where
// M grows, and answers that take a while (barriers, shuffles, loads) are asked for early.
#include "hopper/forward_load.cuh"
#include "hopper/forward_tiles.cuh"
#include "hopper/log2.cuh"

// out = fl(O / l) of this thread's rows.
__device__ __forceinline__ void store_out(const ForwardParams& p, const State& t, const Work& work, int row,
                                          uint32_t lost) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = t.o[D / 2 + 2 * h], inverse = hopper::reciprocal(sum);
    float x[D / 4];
#pragma unroll
    for (int i = 0; i < D / 4; ++i) x[i] = t.o[i / 2 * 4 + 2 * h + i % 2];
    if (hopper::divides_fast(x)) {
#pragma unroll
      for (int i = 0; i < D / 4; ++i) x[i] = hopper::divide_fast(x[i], sum, inverse);
    } else {
#pragma unroll
      for (int i = 0; i < D / 4; ++i) x[i] = hopper::divide_slow(x[i], sum, inverse);
    }
    const bool lost_row = lost & 5u << h;
    if (ptx::vote_any(lost_row)) {
#pragma unroll
      for (int i = 0; i < D / 4; ++i) x[i] = lost_row ? hopper::not_a_number() : x[i];
    }
    if (row + 8 * h >= work.rows) continue;
    const int64_t token = int64_t(work.start) + row + 8 * h;
    char* const out = static_cast<char*>(const_cast<void*>(p.out.data)) +
                      (token * p.out.token_stride + work.head * p.out.head_stride + 2 * (threadIdx.x % 4)) *
                          p.element_bytes;
    if (p.element_bytes == 4) {
#pragma unroll
      for (int i = 0; i < D / 4; i += 2) {
        ptx::st_global_v2(out + 16 * i, __float_as_uint(x[i]), __float_as_uint(x[i + 1]));
      }
    } else if (p.half) {
#pragma unroll
      for (int i = 0; i < D / 4; i += 2) ptx::st_global_b32(out + 8 * i, ptx::cvt_rn_f16x2_f32(x[i + 1], x[i]));
    } else {
#pragma unroll
      for (int i = 0; i < D / 4; i += 2) ptx::st_global_b32(out + 8 * i, ptx::cvt_rn_bf16x2_f32(x[i + 1], x[i]));
    }
  }
}

// lse, m and l: of the four lanes that share two rows, one for each row.
__device__ __forceinline__ void store_sums(const ForwardParams& p, const State& t, const Work& work, int row,
                                           uint32_t lost) {
  const int h = threadIdx.x % 4;
  if (h > 1 || row + 8 * h >= work.rows) return;
  const float sum = h == 0 ? t.o[D / 2] : t.o[D / 2 + 2], top = h == 0 ? t.rows.top[0] : t.rows.top[1];
  const bool lost_l = lost >> h & 1;
  const int64_t at = work.head * p.num_tokens + work.start + row + 8 * h;
  const double natural = 0.6931471805599453 * (double(top) + hopper::log2_f64(sum));
  p.m[at] = top;
  p.l[at] = lost_l ? hopper::not_a_number() : sum;
  p.lse[at] = lost_l ? hopper::not_a_number() : float(natural);
}

__device__ __forceinline__ void consume(const ForwardParams& p, Shared& shared) {
  const int group = threadIdx.x / 128 - 1;
  Self self = {threadIdx.x % 32 == 0, ptx::shared_address(&shared), uint32_t(group)};
  if (group == 1) ptx::barrier_arrive(TURN, 128 * GROUPS);
  ptx::keep(self.leader);
  ptx::keep(self.shared);
  WorkRing ring;
  KvRing kv;
  for (;; ring.advance()) {
    const uint32_t stage = ring.stage;
    wait(self, WORK_FULL, stage, ring.phase);
    const Work& work = shared.work[stage];  // read anew where it is used: registers are scarce
    if (work.keys == 0) break;
    wait(self, Q_FULL, stage, ring.phase);
    if (64 * group >= work.rows) {  // no row of this warpgroup's
      for (int j = 0; j < work.keys; ++j, kv.advance()) {
        wait(self, K_FULL, kv.stage, kv.phase);
        release(self, K_EMPTY, kv.stage);
        wait(self, V_FULL, kv.stage, kv.phase);
        release(self, V_EMPTY, kv.stage);
        if (j > 0) {
          await_turn(self);
          give_turn(self);
        }
      }
      release(self, Q_EMPTY, stage);
      release(self, WORK_EMPTY, stage);
      continue;
    }

    State t;
    const uint32_t slots = Q_SLOT[0] + stage * (Q_SLOT[1] - Q_SLOT[0]);
    const uint32_t q_low = low_word(self.shared) - slots * SLOT_PIECES + group * 64 * WIDTH / 16;
    wait(self, K_FULL, kv.stage, kv.phase);
    start_scores(t.s, uniform(q_low), low_word_of_keys(self.shared, uniform(kv.stage)));
    const float* const exponents = shared.q_exponents[stage];
    const int row = row_of_thread();
    t.rows.flags = work.slow ? hopper::SLOW : 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      t.rows.c[h] = __fmul_rn(p.c, work.slow ? 1.0f : row_scale(exponents[row + 8 * h]));
      t.rows.top[h] = hopper::minus_infinity();
    }
#pragma unroll
    for (int i = 0; i < O_REGISTERS; ++i) t.o[i] = 0.0f;
    add_tiles(t, shared, kv, q_low, {work, exponents, bool(p.causal), false}, self);
    uint32_t lost = t.rows.flags & 3;  // bit h: P and l of row h are NaN; bit 2 + h: O is
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) lost |= ptx::shfl_bfly(lost, lanes);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float e = exponents[row + 8 * h];
      if (e != e) {
        lost |= 1u << h;
        t.rows.top[h] = hopper::minus_infinity();
      }
      if ((work.lost & 1) || row + 8 * h >= work.first_lost_k) lost |= 1u << h;
      if ((work.lost & 2) || row + 8 * h >= work.first_lost_v) lost |= 4u << h;
    }
    release(self, Q_EMPTY, stage);
    store_out(p, t, work, row, lost);
    store_sums(p, t, work, row, lost);
    release(self, WORK_EMPTY, stage);
  }
  if (group == 0) await_turn(self);  // the last one that was given
}

// Registers per thread: what the launch bounds leave at entry, and what the two kinds of warpgroups trade. A warpgroup
// that asks for more than the other gave waits without end.
constexpr int ENTRY_REGISTERS = 65536 / THREADS / 8 * 8, PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
static_assert(PRODUCER_REGISTERS + GROUPS * CONSUMER_REGISTERS <= (GROUPS + 1) * ENTRY_REGISTERS,
              "a CTA's warpgroups share the registers that it was launched with");

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(const __grid_constant__ ForwardParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  uint32_t* const ones = reinterpret_cast<uint32_t*>(slot(shared, 0));
  for (int i = threadIdx.x; i < hopper::PANEL_BYTES / 4; i += THREADS) ones[i] = 0x3F803F80u;
  ptx::fence_proxy_async();
  if (threadIdx.x == 0) {
    const uint32_t at = ptx::shared_address(&shared);
    for (int i = 0; i < WORK_STAGES; ++i) {
      ptx::mbarrier_init(barrier(at, WORK_FULL, i), 1);
      ptx::mbarrier_init(barrier(at, WORK_EMPTY, i), 4 * GROUPS + 1);
      ptx::mbarrier_init(barrier(at, Q_FULL, i), 1);
      ptx::mbarrier_init(barrier(at, Q_EMPTY, i), 4 * GROUPS);
    }
    for (int i = 0; i < KV_STAGES; ++i) {
      ptx::mbarrier_init(barrier(at, K_FULL, i), 1);
      ptx::mbarrier_init(barrier(at, K_EMPTY, i), 4 * GROUPS);
      ptx::mbarrier_init(barrier(at, V_FULL, i), 1);
      ptx::mbarrier_init(barrier(at, V_EMPTY, i), 4 * GROUPS);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < 32) take_items(p, shared);
    if (threadIdx.x == 32) fetch_items(p, shared);
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, shared);
  }
}
