// Attention forward on Hopper: Note [Forward] of flamia.reference.forward under the profile "hopper", bit for bit.
//
// Note [Forward on Hopper]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// A CTA is two consumer warpgroups of 64 rows each and four warps that serve them: one takes and inspects work items and
// fetches queries, two fetch keys and values, one stores m, l and LSE.
// Per key tile, a warpgroup computes S with wgmma (E4M3 codes, or bfloat16), P in registers (hopper/softmax.cuh), and
// adds P V to O with wgmma in bfloat16 (wide copies of V, Note [Wide tile]). l is one more column of that product: 8
// channels of ones lie behind each stage of V (Note [Slots]).
//
// P is made in two halves. P V of the first runs while the second is made; then S of the next tile and P V of the second
// are started together, and scores of the next tile are measured and the first half of its P is made while they run.
// The two warpgroups start S in turns (Note [Turns]). All key tiles go through one loop body: what only some of them
// need is jumped over, because a short document lives on the instruction cache. For short documents, too, S of the next
// query tile is under way when O of this one is divided and stored (Note [Next item]), and a last query tile that has
// rows for one warpgroup only is done for two heads at once (Note [Two heads]).
//
// The four warps of a warpgroup start each product together, so that what one of them waits for, all wait for. Nothing
// in the loop's path takes longer in one warp than in another but the rescaling of O and l, by exact powers of two where
// M grows, and answers that take a while (barriers, shuffles, loads) are asked for early.
#include "hopper/forward_load.cuh"
#include "hopper/forward_out.cuh"

__device__ __forceinline__ void consume(const ForwardParams& p, Shared& shared) {
  const int group = uniform(threadIdx.x / 128 - 1);
  Self self = {ptx::arrives(threadIdx.x % 32), ptx::shared_address(&shared), uint32_t(group)};
  if (group == 1) ptx::barrier_arrive(TURN, 128 * GROUPS);
  ptx::keep(self.arrives);
  ptx::keep(self.shared);
  WorkRing ring;
  KvRing kv;
  State t;
  bool started = false;  // S of this query tile is under way: Note [Next item]
  for (;;) {
    const uint32_t stage = ring.stage;
    const Work& work = shared.work[stage][group];  // read anew where it is used: registers are scarce
    if (!started) {
      ptx::wgmma_wait_group<0>();
      keep_all(t.s);
      wait(self, WORK_FULL, stage, ring.phase);
      if (uniform(work.keys) == 0) break;
      wait(self, Q_FULL, stage, ring.phase);
      if (uniform(64 * group >= work.rows)) {  // no row of this warpgroup's
        for (int j = 0; j < work.keys; ++j, kv.advance()) {
          wait(self, K_FULL, kv.stage, kv.phase);
          release(self, K_EMPTY, kv.stage);
          wait(self, V_FULL, kv.stage, kv.phase);
          release(self, V_EMPTY, kv.stage);
          await_turn(self);
          give_turn(self);
        }
        release(self, Q_EMPTY, stage);
        release(self, SUMS_FULL, stage);
        ring.advance();
        continue;
      }
      start_item(t, self, work, stage, kv);
    }
    ring.advance();
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
    const View view = {work, exponents, uniform(work.heads), bool(p.causal), false};
    started = add_tiles(t, shared, kv, low_word_of_queries(self, stage), view, self, ring);
    finish(p, shared, t, self, stage);
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
  const auto clear = [](uint8_t* first, uint32_t bytes) {
#pragma unroll 1
    for (uint32_t i = 16 * threadIdx.x; i < bytes; i += 16 * THREADS) {
      *reinterpret_cast<uint4*>(first + i) = make_uint4(0, 0, 0, 0);
    }
  };
#pragma unroll 1
  for (int stage = 0; E4M3 && stage < KV_STAGES; ++stage) {  // halves that `fetch_keys` may leave as they are
    clear(slot(shared, K_SLOT + stage * K_SLOT_STEP) + TILE_BYTES / 2, TILE_BYTES / 2);
    for (int i = 1; i <= PANELS; ++i) {
      clear(slot(shared, i * pick(V_DISTANCE, stage)) + hopper::PANEL_BYTES / 2, hopper::PANEL_BYTES / 2);
    }
  }
  ptx::fence_proxy_async();
  if (threadIdx.x == 0) {
    const uint32_t at = ptx::shared_address(&shared);
    constexpr uint32_t CONSUMING = 4 * GROUPS * ptx::WARP_ARRIVALS;
    for (int i = 0; i < WORK_STAGES; ++i) {
      ptx::mbarrier_init(barrier(at, WORK_FULL, i), ptx::WARP_ARRIVALS);
      ptx::mbarrier_init(barrier(at, WORK_EMPTY, i), 2 + ptx::WARP_ARRIVALS);
      ptx::mbarrier_init(barrier(at, Q_FULL, i), 1);
      ptx::mbarrier_init(barrier(at, Q_EMPTY, i), CONSUMING);
      ptx::mbarrier_init(barrier(at, SUMS_FULL, i), CONSUMING);
    }
    for (int i = 0; i < KV_STAGES; ++i) {
      ptx::mbarrier_init(barrier(at, K_FULL, i), 1);
      ptx::mbarrier_init(barrier(at, K_EMPTY, i), CONSUMING);
      ptx::mbarrier_init(barrier(at, V_FULL, i), 1);
      ptx::mbarrier_init(barrier(at, V_EMPTY, i), CONSUMING);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < 32) take_items(p, shared);
    if (threadIdx.x == 32) fetch_items<false>(p, shared);
    if (threadIdx.x == 64) fetch_items<true>(p, shared);
    if (threadIdx.x >= 96) store_sums(p, shared);
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, shared);
  }
}
