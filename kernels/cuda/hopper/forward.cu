// Attention forward on Hopper: Note [Forward] of flamia.reference.forward under the profile "hopper", bit for bit.
//
// Note [Forward on Hopper]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// A CTA is two producer warps, one of which takes and inspects work items while the other fetches their tiles, and two
// consumer warpgroups of 64 rows each.
// Per key tile, a warpgroup computes S with wgmma (E4M3 codes, or bfloat16), P in registers (hopper/softmax.cuh), and
// adds P V to O with wgmma in bfloat16, where everything is exact (wide copies of V, Note [Wide tile]). l is one more
// column of that product: 8 channels of ones lie behind each stage of V (Note [Slots]).
//
// S of the next tile and P V of this one are started together. While P V runs, P of the next tile takes the registers
// of this one's, half by half. O is rescaled only where M grows, by exact powers of two. All key tiles go through one
// loop body: what only some of them need is jumped over, because a short document lives on the instruction cache.
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
  const int row = 64 * group + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;  // of h = 0
  WorkRing ring;
  QRing q;
  KvRing k, v;
  for (;; ring.advance(), q.advance()) {
    hopper::wait(ptx::shared_address(&shared.work_full[ring.stage]), ring.phase);
    const Work& work = shared.work[ring.stage];  // read anew where it is used: registers are scarce
    if (work.keys == 0) break;
    hopper::wait(ptx::shared_address(&shared.q_full[q.stage]), q.phase);
    if (64 * group >= work.rows) {  // no row of this warpgroup's
      for (int j = 0; j < work.keys; ++j, k.advance(), v.advance()) {
        hopper::wait(ptx::shared_address(&shared.k_full[k.stage]), k.phase);
        release(shared.k_empty[k.stage]);
        hopper::wait(ptx::shared_address(&shared.v_full[v.stage]), v.phase);
        release(shared.v_empty[v.stage]);
      }
      release(shared.q_empty[q.stage]);
      release(shared.work_empty[ring.stage]);
      continue;
    }

    State t;
    const uint32_t rows = ptx::shared_address(slot(shared, Q_SLOT[0] + q.stage * (Q_SLOT[1] - Q_SLOT[0]))) +
                          group * 64 * (ROW_BYTES < 128 ? ROW_BYTES : 128);
    const uint32_t q_rows = uniform(rows);
    hopper::wait(ptx::shared_address(&shared.k_full[k.stage]), k.phase);
    start_scores(t.s, shared, q_rows, uniform(k.stage));
    const float* const exponents = shared.q_exponents[q.stage];
    t.rows.c = p.c;
    t.rows.lost = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      t.rows.scaled[h] = E4M3 ? __fmul_rn(p.c, hopper::decode_exponent(exponents[row + 8 * h])) : p.c;
      t.rows.top[h] = hopper::minus_infinity();
      t.rows.known[h] = hopper::not_a_number();
    }
#pragma unroll
    for (int i = 0; i < O_REGISTERS; ++i) t.o[i] = 0.0f;
    add_tiles(t, shared, k, v, q_rows, work, exponents, p.causal);
    uint32_t lost = t.rows.lost;  // bit h: P and l of row h are NaN; bit 2 + h: O is
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
    release(shared.q_empty[q.stage]);
    store_out(p, t, work, row, lost);
    store_sums(p, t, work, row, lost);
    release(shared.work_empty[ring.stage]);
  }
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
    for (int i = 0; i < WORK_STAGES; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.work_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.work_empty[i]), 4 * GROUPS + 1);
    }
    for (int i = 0; i < Q_STAGES; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.q_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.q_empty[i]), 4 * GROUPS);
    }
    for (int i = 0; i < KV_STAGES; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&shared.k_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.k_empty[i]), 4 * GROUPS);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&shared.v_empty[i]), 4 * GROUPS);
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
