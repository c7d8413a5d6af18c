// The Hopper forward: from O and l in registers to out, m, l and LSE.
#pragma once

#include "hopper/forward_tiles.cuh"
#include "hopper/log2.cuh"

// O of this thread's rows to fl(O / l); NaN where `lost` says so: bit h or 2 + h for row h.
__device__ __forceinline__ void divide(State& t, uint32_t lost) {
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) inverse[h] = hopper::reciprocal(t.o[D / 2 + 2 * h]);
  float (&x)[D / 2] = reinterpret_cast<float (&)[D / 2]>(t.o);
  if (hopper::divides_fast(x)) {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) x[i] = hopper::divide_fast(x[i], t.o[D / 2 + i / 2 % 2 * 2], inverse[i / 2 % 2]);
  } else {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) x[i] = hopper::divide_slow(x[i], t.o[D / 2 + i / 2 % 2 * 2], inverse[i / 2 % 2]);
  }
  if (ptx::vote_any(lost)) {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) x[i] = lost & 5u << i / 2 % 2 ? hopper::not_a_number() : x[i];
  }
}

// Note [Stores of out]
// ~~~~~~~~~~~~~~~~~~~~
// In an accumulator, 8 channels of a row lie in four lanes: 16 bytes of out, half of a sector. So a warp turns its 16
// rows around in shared memory, where the rows of Q were that it needs no more: WIDTH bytes of each row at a time,
// 16-byte piece c of row r at place c ^ r (rows of 64 bytes: c ^ r / 2), without a bank conflict.
constexpr int STAGED = WIDTH / 2;     // channels at a time
constexpr int PIECES = WIDTH / 16;    // of a row
constexpr int AT_ONCE = 32 / PIECES;  // rows of a store
__device__ __forceinline__ uint32_t place_of(int row, int piece) {
  return row * WIDTH + 16 * (piece ^ (WIDTH == 128 ? row : row / 2) % PIECES);
}

// 16 rows, of which the document has `rows`, as two-byte elements. `out` is where the first one begins, it and
// `row_bytes` multiples of 16; `staged` is called when `stage` is free again.
template <class Staged>
__device__ __forceinline__ void store_pairs(const State& t, char* out, int64_t row_bytes, int rows, bool half,
                                            uint8_t* stage, Staged staged) {
  const int lane = ptx::thread_index() % 32, row = lane / PIECES;
  const uint32_t to = ptx::shared_address(stage) + place_of(lane % 16, lane / 16), from = place_of(row, lane % PIECES);
  uint4 piece[D / STAGED][16 / AT_ONCE];
#pragma unroll
  for (int part = 0; part < D / STAGED; ++part) {
    if (part > 0) ptx::bar_warp_sync();
#pragma unroll
    for (int i = 0; i < STAGED; i += 16) {
      const float* const x = t.o + (part * STAGED + i) / 2;
      uint32_t pairs[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        pairs[w] = half ? ptx::cvt_rn_f16x2_f32(x[2 * w + 1], x[2 * w]) : ptx::cvt_rn_bf16x2_f32(x[2 * w + 1], x[2 * w]);
      }
      ptx::stmatrix_x4(to ^ 2 * i, pairs);
    }
    ptx::bar_warp_sync();
#pragma unroll
    for (int i = 0; i < 16; i += AT_ONCE) {
      piece[part][i / AT_ONCE] = *reinterpret_cast<const uint4*>(stage + (from ^ 16 * (i % PIECES)) + i * WIDTH);
    }
  }
  staged();
  out += row * row_bytes + 16 * (lane % PIECES);
#pragma unroll
  for (int i = 0; i < 16; i += AT_ONCE) {
    if (row + i >= rows) break;
#pragma unroll
    for (int part = 0; part < D / STAGED; ++part) {
      ptx::st_global_v4(out + i * row_bytes + 2 * STAGED * part, piece[part][i / AT_ONCE]);
    }
  }
}

// The same as float32, from the registers.
__device__ __forceinline__ void store_singles(const State& t, char* out, int64_t row_bytes, int rows) {
  const int lane = ptx::thread_index() % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane / 4 + 8 * h;
    if (row >= rows) continue;
#pragma unroll
    for (int i = 2 * h; i < D / 2; i += 4) {
      ptx::st_global_v2(out + row * row_bytes + 8 * (lane % 4 + i - 2 * h), __float_as_uint(t.o[i]),
                        __float_as_uint(t.o[i + 1]));
    }
  }
}

// What is left of a query tile when O and l are there, while S of the next one is computed.
__device__ __forceinline__ void finish(const ForwardParams& p, Shared& shared, State& t, const Self& self,
                                       uint32_t stage) {
  const Work& work = shared.work[stage][self.group];
  const int row = row_of_thread(), warp_row = row & ~15, quarter = ptx::thread_index() % 4;
  uint32_t lost = t.rows.flags & 3;  // bit h: P and l of row h are NaN; bit 2 + h: O is
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) lost |= ptx::shfl_bfly(lost, lanes);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float e = shared.q_exponents[stage][row + 8 * h];
    if (e != e) {
      lost |= 1u << h;
      t.rows.top[h] = hopper::minus_infinity();
    }
    if ((work.lost & 1) || row + 8 * h >= work.first_lost_k) lost |= 1u << h;
    if ((work.lost & 2) || row + 8 * h >= work.first_lost_v) lost |= 4u << h;
  }
  // Of the four lanes that share two rows, one for each row.
  if (quarter < 2) {
    const bool second = quarter == 1;
    const float sum = second ? t.o[D / 2 + 2] : t.o[D / 2];
    shared.sums[stage][row + 8 * second] = {second ? t.rows.top[1] : t.rows.top[0],
                                            lost >> second & 1 ? hopper::not_a_number() : sum};
  }
  const int64_t row_bytes = p.out.token_stride * p.element_bytes;
  char* const out = static_cast<char*>(const_cast<void*>(p.out.data)) + (int64_t(work.start) + warp_row) * row_bytes +
                    work.head * p.out.head_stride * p.element_bytes;
  const int rows = work.rows - warp_row;
  release(self, SUMS_FULL, stage);  // `work` may go now
  divide(t, lost);
  if (p.element_bytes == 4) {
    release(self, Q_EMPTY, stage);
    store_singles(t, out, row_bytes, rows);
  } else {
    uint8_t* const used = slot(shared, stage == 0 ? Q_SLOT[0] : Q_SLOT[1]) + warp_row * WIDTH;
    store_pairs(t, out, row_bytes, rows, p.half, used, [&] {
      ptx::fence_proxy_async();  // before Q is fetched to there
      release(self, Q_EMPTY, stage);
    });
  }
}

// m, l and lse of query tiles that are done. By one warp, since logarithms take the time of a key tile.
__device__ __forceinline__ void store_sums(const ForwardParams& p, Shared& shared) {
  const int lane = threadIdx.x % 32;
  const Self self = {ptx::arrives(lane), ptx::shared_address(&shared), 0};
  WorkRing ring;
  for (;; ring.advance()) {
    wait(self, WORK_FULL, ring.stage, ring.phase);
    if (shared.work[ring.stage][0].keys == 0) break;
    wait(self, SUMS_FULL, ring.stage, ring.phase);
#pragma unroll 1
    for (int row = lane; row < layout::TILE; row += 32) {
      const Work& work = shared.work[ring.stage][row / 64];
      if (row >= work.rows) continue;
      const float2 found = shared.sums[ring.stage][row];
      const bool lost = found.y != found.y;
      const double natural = 0.6931471805599453 * (double(found.x) + hopper::log2_f64(found.y));
      const int64_t at = work.head * p.num_tokens + work.start + row;
      p.m[at] = found.x;
      p.l[at] = found.y;
      p.lse[at] = lost ? found.y : float(natural);
    }
    release(self, WORK_EMPTY, ring.stage);
  }
}
