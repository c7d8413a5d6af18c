// q, k and v of an unscaled recipe as wide tiles (Note [Wide tile]): the CUDA form of flamia.reference.operands.prepare
// for Scaling.NONE. Elements are rounded to bfloat16; a token that is not finite then becomes zeros, and its exponent
// NaN. The exponents of other tokens bound their elements and scale nothing.
#include "common/padding.cuh"
#include "common/tokens.cuh"
#include "hopper/ptx.cuh"

struct PackJob {
  Tokens source;
  uint8_t* wide;     // (heads, max_tiles, 256 D)
  float* exponents;  // (heads, max_tiles, 128): e with |x| < 2^e, the same for all tokens of a warp
  int32_t heads;
  int32_t unused;
};

struct PackParams {
  PackJob jobs[3];
  Padding padding;
  const layout::Tile* tiles;
  const int32_t* status;
  int64_t max_tiles;
  int32_t total_heads;
  int32_t unused;
};
static_assert(sizeof(PackParams) == PARAMS_BYTES, "PackParams must match structs.HOPPER_PACK");

using R = Rows<formats::Given, HEAD_DIM, 1>;
constexpr int D = R::D;
static_assert(D == 64 || D == 128, "the Hopper kernels take head_dim 64 and 128");
constexpr int CTAS = R::TOKEN_BYTES <= 128 ? 4 : R::TOKEN_BYTES <= 256 ? 3 : 1;
extern "C" __constant__ const int pack_tokens_shared_bytes = R::STAGES * R::STAGE_PIECES * 16;

// Bits of the elements of a piece in bfloat16, two to a word.
__device__ __forceinline__ void narrow_piece(uint32_t (&words)[R::VALUES / 2], const uint4& piece) {
#pragma unroll
  for (int i = 0; i < R::VALUES / 2; ++i) {
    words[i] = ptx::cvt_rn_bf16x2_f32(R::widen(piece, 2 * i + 1), R::widen(piece, 2 * i));
  }
}

__device__ __forceinline__ void pack_tile(const PackJob& job, int64_t slot, const uint4* stage) {
  uint8_t* const to = job.wide + slot * (layout::TILE * 2 * D);
  uint32_t largest = 0, lost_steps = 0;
#pragma unroll
  for (int step = 0; step < R::STEPS; ++step) {
    uint4 piece[R::PER_LANE];
    R::read(piece, stage, step);
#pragma unroll
    for (int p = 0; p < R::PER_LANE; ++p) {
      uint32_t words[R::VALUES / 2], amax = 0;
      narrow_piece(words, piece[p]);
#pragma unroll
      for (int i = 0; i < R::VALUES / 2; ++i) amax = max(amax, max(words[i] & 0x7FFF, words[i] >> 16 & 0x7FFF));
      const bool lost = R::of_token(ptx::vote_ballot(amax >= formats::BF16::INFINITE)) != 0;
      static_assert(R::PER_LANE == 1, "one ballot sees all lanes of a token");
      if (lost) {
        lost_steps |= 1u << step;
#pragma unroll
        for (int i = 0; i < R::VALUES / 2; ++i) words[i] = 0;
      } else {
        largest = max(largest, amax);
      }
      uint8_t* const at = to + layout::payload_offset<2 * D>(R::row(step), 2 * R::channel(p));
      if constexpr (R::VALUES == 8) {
        ptx::st_global_v4(at, make_uint4(words[0], words[1], words[2], words[3]));
      } else {
        ptx::st_global_v2(at, words[0], words[1]);
      }
    }
  }
  const float exponent = float(int(ptx::redux_max_u32(largest) >> 7) - 126);
  if (R::lane() == 0) {
#pragma unroll
    for (int step = 0; step < R::STEPS; ++step) {
      job.exponents[slot * layout::TILE + R::row(step)] =
          lost_steps >> step & 1 ? __uint_as_float(0x7FC00000u) : exponent;
    }
  }
}

struct JobHead {
  int job;
  int head;
};

__device__ __forceinline__ JobHead find_job(const PackParams& p, int head) {
  const int second = p.jobs[0].heads, third = second + p.jobs[1].heads;
  if (head >= third) return {2, head - third};
  return head >= second ? JobHead{1, head - second} : JobHead{0, head};
}

extern "C" __global__ void __launch_bounds__(R::THREADS, CTAS) pack_tokens(const __grid_constant__ PackParams p) {
  extern __shared__ uint4 stages[];
  for_each_unit<R>(
      Units(p.status[layout::NUM_TILES], p.total_heads), p.tiles, stages,
      [&](const Unit& unit, const layout::Tile& tile, uint4* stage, int) {
        const JobHead found = find_job(p, unit.head);
        R::fetch(stage, p.jobs[found.job].source, tile, found.head);
      },
      [&](const Unit& unit, const layout::Tile&, const uint4* stage, int) {
        const JobHead found = find_job(p, unit.head);
        pack_tile(p.jobs[found.job], found.head * p.max_tiles + unit.tile, stage);
      });
  clear_padding(p.padding, p.status);
}
