// Quantization of q, k and v in one launch and one pass over their data: the CUDA form of
// flamia.reference.scaling.quantize_tokens and .nvfp4.quantize_nvfp4, written as flamia.reference.layout lays out.
//
// A CTA takes one tile of 128 tokens of one head at a time (Note [Lanes of a token]). It reads the tile once, into
// shared memory (Note [Staging]), and writes from there whatever the tensor's job asks for:
//   payload, scales, exponents               token blocks of 1, each of them: Q, K; V1 without the last
//   block_payload, block_scales, ..          token blocks of 32: V32
//   nvfp4_payload, nvfp4_scales, ..          NVFP4, after a Hadamard rotation if the job says so; not with blocks of 32
//   wide, factors                            what the Hopper forward reads of K (factors) and of V1 (both)
#include "common/padding.cuh"
#include "common/tokens.cuh"
#include "hopper/factors.cuh"
#include "quantize/nvfp4.cuh"
#include "quantize/wide.cuh"

struct Job {
  Tokens source;
  uint8_t* payload;             // (heads, max_tiles, 128 D)
  uint8_t* scales;              // (heads, max_tiles, 512 ceil(D / 128)), contraction over channels
  float* exponents;             // (heads, max_tiles, 128)
  uint8_t* block_payload;       // as payload
  uint8_t* block_scales;        // as scales
  uint8_t* block_token_scales;  // as scales, contraction over tokens
  uint8_t* nvfp4_payload;       // (heads, max_tiles, 64 D)
  uint8_t* nvfp4_scales;        // (heads, max_tiles, 8 D)
  const float2* nvfp4_head_scales;  // (heads): S_enc, S_dec
  uint8_t* wide;   // (heads, max_tiles, 256 D): payload and scales, decoded
  float* factors;  // (heads, max_tiles, 132), Note [Factor tile]: that of values where there are wide tiles, else of keys
  int32_t heads;
  int32_t hadamard;
};

struct QuantizeParams {
  Job jobs[3];
  Padding padding;
  const layout::Tile* tiles;
  const int32_t* status;
  int64_t max_tiles;
  int32_t total_heads;  // of all jobs
  int32_t halves;       // where there are wide tiles: Note [Halves with tokens] of quantize/wide.cuh
};
static_assert(sizeof(QuantizeParams) == PARAMS_BYTES, "QuantizeParams must match structs.QUANTIZE");

using R = Rows<formats::Given, HEAD_DIM, 1>;
constexpr int D = R::D;
constexpr int PAYLOAD_BYTES = layout::TILE * D;
constexpr int SCALE_BYTES = (D + 127) / 128 * layout::SCALE_TILE_BYTES;

// CTAs per multiprocessor, by their shared memory; this bounds the registers.
constexpr int CTAS = R::TOKEN_BYTES <= 128 ? 4 : R::TOKEN_BYTES <= 256 ? 3 : 1;
extern "C" __constant__ const int quantize_shared_bytes = R::STAGES * R::STAGE_PIECES * 16;
extern "C" __constant__ const int quantize_nvfp4_shared_bytes = R::STAGES * R::STAGE_PIECES * 16;

// The exponent of a token whose payload is all zero: Note [Folded exponents] of flamia.reference.operands.
constexpr float ZERO_TOKEN_EXPONENT = -8.0f;

struct alignas(16) Shared {
  uint8_t byte[layout::TILE];  // scale of each token
  uint8_t zero[layout::TILE];  // whether its payload is all zero
  uint32_t amax[R::WARPS];     // of the finite tokens of each warp, as bits of a float32
  uint32_t lost[R::WARPS];     // whether one is not finite
  uint32_t nvfp4[layout::TILE][D / 64 + 1];  // scale bytes of each token, four to a word
};

// The exponent of a token of the tile; NaN of a lost one.
__device__ __forceinline__ float token_exponent(const Shared& shared, int row) {
  const uint32_t byte = shared.byte[row];
  const float exponent = byte == formats::E8M0_NAN ? __uint_as_float(0x7FC00000u) : float(int(byte) - 127);
  return shared.zero[row] ? ZERO_TOKEN_EXPONENT : exponent;
}

// The tokens of one step under the scale whose inverse is `factor`; zeros if that is 0. If WIDE, as codes if `payload` is
// given, and as bfloat16 numbers if `wide` is.
template <bool WIDE>
__device__ __forceinline__ void store_step(uint8_t* payload, const float (&x)[R::PER_LANE][R::VALUES], int step,
                                           float factor, uint8_t* wide = nullptr) {
  // 1 / factor, the token's scale; finite where factor is 0, and so are all codes.
  const float scale = __uint_as_float(max((254u << 23) - __float_as_uint(factor), __float_as_uint(0x1p-127f)));
#pragma unroll
  for (int p = 0; p < R::PER_LANE; ++p) {
    uint32_t codes[R::VALUES / 4];
    encode_piece<R>(codes, x[p], factor);
    if (!R::has_piece(p)) continue;
    if (!WIDE || payload != nullptr) store_codes<R>(payload, R::row(step), R::channel(p), codes);
    if (WIDE && wide != nullptr) store_wide<R>(wide, R::row(step), R::channel(p), codes, scale);
  }
}

// Payloads of token blocks of 1 and of 32, each if the job asks for it, and in `shared` what their scale tiles hold.
// `rows` is what Note [Halves with tokens] says the tile has.
template <bool WIDE>
__device__ __forceinline__ void write_blocks(const Job& job, int rows, int64_t slot, const uint4* stage,
                                             Shared& shared) {
  const int warp = R::warp();

  // ---- scales: each lane for the token that it owns ----------------------------------------------------------
  uint32_t packed[R::STEPS];
#pragma unroll
  for (int step = 0; step < R::STEPS; ++step) {
    uint4 piece[R::PER_LANE];
    R::read(piece, stage, step);
    packed[step] = R::piece_amax(piece);
  }
  const TokenScale<R> scale(R::owned_amax(packed));
  if (R::is_first_owner()) {
    shared.byte[R::owned_row()] = scale.byte();
    shared.zero[R::owned_row()] = scale.is_zero();
  }
  const uint32_t warp_amax = ptx::redux_max_u32(__float_as_uint(scale.amax)), warp_lost = ptx::vote_ballot(scale.lost);
  if (threadIdx.x % 32 == 0) {
    shared.amax[warp] = warp_amax;
    shared.lost[warp] = warp_lost;
  }
  __syncthreads();

  // ---- payloads ----------------------------------------------------------------------------------------------
  static_assert(layout::TILE / 2 % R::TOKENS == 0, "a warp's tokens are of one half");
  if (WIDE && !in_used_half(warp * R::TOKENS, rows)) return;
  const float largest = __uint_as_float(R::over_block(shared.amax, warp / R::WARPS_PER_BLOCK));
  const uint32_t block_byte = formats::rceil_e4m3(largest);
  const float block_factor = formats::inverse_e8m0(block_byte);
  uint8_t* const payload = job.payload == nullptr ? nullptr : job.payload + slot * PAYLOAD_BYTES;
  uint8_t* const wide = !WIDE || job.wide == nullptr ? nullptr : job.wide + slot * (2 * PAYLOAD_BYTES);
#pragma unroll 4
  for (int step = 0; step < R::STEPS; ++step) {
    uint4 piece[R::PER_LANE];
    R::read(piece, stage, step);
    float x[R::PER_LANE][R::VALUES];
#pragma unroll
    for (int p = 0; p < R::PER_LANE; ++p) widen_piece<R>(x[p], piece[p]);
    const float factor = __uint_as_float(R::from_owner(__float_as_uint(scale.factor()), step));
    if (payload != nullptr || wide != nullptr) store_step<WIDE>(payload, x, step, factor, wide);
    if (job.block_payload != nullptr) {
      store_step<false>(job.block_payload + slot * PAYLOAD_BYTES, x, step, factor == 0.0f ? 0.0f : block_factor);
    }
  }
}

// Note [Factor tile]. By one warp.
__device__ __forceinline__ void write_key_tile(const Job& job, int rows, int64_t slot, const Shared& shared) {
  const int lane = threadIdx.x % 32;
  float exponent[layout::BLOCKS];
  bool lost[layout::BLOCKS];
#pragma unroll
  for (int b = 0; b < layout::BLOCKS; ++b) {
    const int row = layout::BLOCK * b + lane;
    lost[b] = row < rows && shared.byte[row] == formats::E8M0_NAN;
    exponent[b] = token_exponent(shared, row);
  }
  float* const to = job.factors + slot * hopper::FACTOR_WORDS;
  if (job.wide == nullptr) {
    hopper::write_key_factors(to, exponent, rows, true);
  } else {
    hopper::write_lost_values(to, lost);
  }
}

// The scale tiles of `shared`, a warp each.
template <bool NVFP4, bool WIDE>
__device__ __forceinline__ void write_scale_tiles(const Job& job, int rows, int64_t slot, const Shared& shared) {
  const int warp = R::warp(), lane = threadIdx.x % 32;
  if (warp == 0 && job.scales != nullptr) store_channel_scales<D>(job.scales + slot * SCALE_BYTES, shared.byte, lane);
  if (warp == 1 && job.exponents != nullptr) {
#pragma unroll
    for (int row = lane; row < layout::TILE; row += 32) {
      job.exponents[slot * layout::TILE + row] = token_exponent(shared, row);
    }
  }
  if (warp == 2 && job.block_payload != nullptr) {
    uint32_t bytes[layout::BLOCKS], word = 0;
#pragma unroll
    for (int b = 0; b < layout::BLOCKS; ++b) {
      const uint32_t finite = formats::rceil_e4m3(__uint_as_float(R::over_block(shared.amax, b)));
      const uint32_t of_block = R::over_block(shared.lost, b) ? formats::E8M0_NAN : finite;
      bytes[b] = layout::BLOCK * b + lane < rows ? of_block : 0;
      word |= (layout::BLOCK * b < rows ? of_block : 0) << 8 * b;
    }
    store_block_scales<D>(job.block_scales + slot * SCALE_BYTES, bytes, lane);
    store_token_scales<D>(job.block_token_scales + slot * SCALE_BYTES, word, lane);
  }
  if (WIDE && warp == 3 && job.factors != nullptr) write_key_tile(job, rows, slot, shared);
  const int u = warp - (R::WARPS - D / 64);
  if (NVFP4 && job.nvfp4_payload != nullptr && u >= 0) {
    ptx::st_global_v4(job.nvfp4_scales + slot * (8 * D) + u * layout::SCALE_TILE_BYTES + 16 * lane,
                      make_uint4(shared.nvfp4[lane][u], shared.nvfp4[lane + 32][u], shared.nvfp4[lane + 64][u],
                                 shared.nvfp4[lane + 96][u]));
  }
}

// One tile. `shared` is in use by no other thread, and is so again after the barrier in the call after the next one.
template <bool NVFP4, bool WIDE>
__device__ __forceinline__ void quantize_tile(const Job& job, int head, const layout::Tile& tile, bool halves,
                                              int64_t slot, const uint4* stage, Shared& shared) {
  bool done = false;
  if constexpr (NVFP4) {
    if (job.nvfp4_payload != nullptr) {
      uint8_t* const payload = job.payload == nullptr ? nullptr : job.payload + slot * PAYLOAD_BYTES;
      nvfp4::quantize_warp<R>(stage, tile.rows, job.hadamard, job.nvfp4_head_scales[head],
                              {payload, shared.byte, shared.zero}, job.nvfp4_payload + slot * (PAYLOAD_BYTES / 2),
                              shared.nvfp4);
      done = nvfp4::TOGETHER<R>;
    }
  }
  if (done) {
    __syncthreads();
  } else {
    write_blocks<WIDE>(job, halves ? tile.rows : layout::TILE, slot, stage, shared);
  }
  write_scale_tiles<NVFP4, WIDE>(job, tile.rows, slot, shared);
}

// Of the heads of all jobs, in their order: the job, and its head.
struct JobHead {
  int job;
  int head;
};

__device__ __forceinline__ JobHead find_job(const QuantizeParams& p, int head) {
  const int second = p.jobs[0].heads, third = second + p.jobs[1].heads;
  if (head >= third) return {2, head - third};
  return head >= second ? JobHead{1, head - second} : JobHead{0, head};
}

template <bool NVFP4, bool WIDE>
__device__ __forceinline__ void quantize_all(const QuantizeParams& p) {
  extern __shared__ uint4 stages[];
  // Two, so that one barrier per tile is enough: what a tile writes is read before the barrier of the next one.
  __shared__ Shared shared[2];
  for_each_unit<R>(
      Units(p.status[layout::NUM_TILES], p.total_heads), p.tiles, stages,
      [&](const Unit& unit, const layout::Tile& tile, uint4* stage, int) {
        const JobHead found = find_job(p, unit.head);
        R::fetch(stage, p.jobs[found.job].source, tile, found.head);
      },
      [&](const Unit& unit, const layout::Tile& tile, const uint4* stage, int parity) {
        const JobHead found = find_job(p, unit.head);
        const int64_t slot = found.head * p.max_tiles + unit.tile;
        quantize_tile<NVFP4, WIDE>(p.jobs[found.job], found.head, tile, p.halves, slot, stage, shared[parity]);
      });
  clear_padding(p.padding, p.status);
}

extern "C" __global__ void __launch_bounds__(R::THREADS, CTAS) quantize(const __grid_constant__ QuantizeParams p) {
  quantize_all<false, false>(p);
}

// The same where a job asks for NVFP4, which none does for a D that it has no tiles for.
extern "C" __global__ void __launch_bounds__(R::THREADS, CTAS)
    quantize_nvfp4(const __grid_constant__ QuantizeParams p) {
  quantize_all<nvfp4::AVAILABLE<D>, false>(p);
}

// The same where a job asks for wide tiles or for what a key tile tells: on Hopper alone.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __constant__ const int quantize_wide_shared_bytes = R::STAGES * R::STAGE_PIECES * 16;
extern "C" __global__ void __launch_bounds__(R::THREADS, CTAS) quantize_wide(const __grid_constant__ QuantizeParams p) {
  quantize_all<false, true>(p);
}
#endif
