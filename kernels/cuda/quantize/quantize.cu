// Quantization of q, k and v in one launch and one pass over their data: the CUDA form of
// flamia.reference.scaling.quantize_tokens and .nvfp4.quantize_nvfp4, written as flamia.reference.layout lays out.
//
// A CTA takes one tile of 128 tokens of one head at a time (Note [Lanes of a token]). It reads the tile into
// registers once and writes from there whatever the tensor's job asks for:
//   payload, scales, exponents               token blocks of 1: Q, K, V1
//   block_payload, block_scales, ..          token blocks of 32: V32
//   nvfp4_payload, nvfp4_scales              NVFP4, after a Hadamard rotation if the job says so; Q, K
// Heads run fastest over CTAs, so that those at work together read the same rows of the packed tensors.
#include "common/padding.cuh"
#include "common/tokens.cuh"
#include "quantize/nvfp4.cuh"

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
  int32_t unused;
};
static_assert(sizeof(QuantizeParams) == PARAMS_BYTES, "QuantizeParams must match structs.QUANTIZE");

using R = Rows<formats::Given, HEAD_DIM>;
constexpr int D = R::D;
constexpr int PAYLOAD_BYTES = layout::TILE * D;
constexpr int SCALE_BYTES = (D + 127) / 128 * layout::SCALE_TILE_BYTES;

// CTAs per multiprocessor, which bounds the registers: a tile takes up to 32 per thread, 64 in the widest case.
constexpr int CTAS = R::WARPS == 8 ? 3 : 1;

// The exponent of a token whose payload is all zero: Note [Folded exponents] of flamia.reference.operands.
constexpr float ZERO_TOKEN_EXPONENT = -8.0f;
// Largest amax whose payload is all zero: 2^-137 * 2^127 = 2^-10 is halfway to the smallest code and rounds to 0.
constexpr uint32_t ZERO_TOKEN_AMAX = 0x00001000u;

struct alignas(16) Shared {
  uint8_t byte[layout::TILE];  // scale of each token
  uint8_t zero[layout::TILE];  // whether its payload is all zero
  uint32_t amax[R::WARPS];     // of the finite tokens of each warp, as bits of a float32
  uint32_t lost[R::WARPS];     // whether one is not finite
  uint32_t nvfp4[layout::TILE][D / 64 + 1];  // scale bytes of each token, four to a word
};

// ---- token blocks of 1, and NVFP4 ------------------------------------------------------------------------------

// What a token's largest magnitude says about it.
struct TokenScale {
  float amax;  // 0 for a lost token
  bool lost;   // holds an Inf or a NaN
};

__device__ __forceinline__ TokenScale find_scale(const uint4 (&piece)[R::PER_LANE]) {
  uint32_t packed = 0;
#pragma unroll
  for (int p = 0; p < R::PER_LANE; ++p) packed = R::packed_max(packed, R::packed_amax(piece[p]));
  const uint32_t magnitude = R::token_amax(packed);
  const bool lost = magnitude >= R::Element::INFINITE;
  return {lost ? 0.0f : R::Element::widen(magnitude), lost};
}

// Encode the tokens of one step under the scale 2^(byte - 127).
__device__ __forceinline__ void store_step(uint8_t* payload, const uint4 (&piece)[R::PER_LANE], int step, uint32_t byte,
                                           bool lost) {
  const float factor = formats::inverse_e8m0(byte);
#pragma unroll
  for (int p = 0; p < R::PER_LANE; ++p) {
    float x[R::VALUES];
    widen_piece<R>(x, piece[p]);
    uint32_t codes[R::VALUES / 4];
    encode_piece<R>(codes, x, factor, lost);
    if (R::has_piece(p)) store_codes<R>(payload, R::row(step), R::channel(p), codes);
  }
}

// The tokens of one step by their own scales.
__device__ __forceinline__ void quantize_tokens(const Job& job, int64_t slot, const uint4 (&piece)[R::PER_LANE], int step,
                                                TokenScale scale, Shared& shared) {
  const uint32_t byte = formats::rceil_e4m3(scale.amax);
  store_step(job.payload + slot * PAYLOAD_BYTES, piece, step, byte, scale.lost);
  if (R::lane() == 0) {
    shared.byte[R::row(step)] = scale.lost ? formats::E8M0_NAN : byte;
    shared.zero[R::row(step)] = !scale.lost && __float_as_uint(scale.amax) <= ZERO_TOKEN_AMAX;
  }
}

// A tile whose tokens need nothing of each other: some steps at a time, while the next ones are on their way.
__device__ __forceinline__ void quantize_by_token(const Job& job, int head, const layout::Tile& tile, int64_t slot,
                                                  Shared& shared) {
  constexpr int GROUP = R::PER_LANE == 1 ? 2 : 1;
  uint4 next[GROUP][R::PER_LANE];
  R::load(next, job.source, tile, head, 0);
#pragma unroll 1
  for (int step = 0; step < R::STEPS; step += GROUP) {
    uint4 piece[GROUP][R::PER_LANE];
#pragma unroll
    for (int k = 0; k < GROUP; ++k) {
#pragma unroll
      for (int p = 0; p < R::PER_LANE; ++p) piece[k][p] = next[k][p];
    }
    if (step + GROUP < R::STEPS) R::load(next, job.source, tile, head, step + GROUP);
#pragma unroll
    for (int k = 0; k < GROUP; ++k) {
      if (job.payload != nullptr) quantize_tokens(job, slot, piece[k], step + k, find_scale(piece[k]), shared);
      if constexpr (nvfp4::AVAILABLE<D>) {
        if (job.nvfp4_payload != nullptr) {
          nvfp4::quantize_step<R>(piece[k], step + k, R::row(step + k) < tile.rows, job.hadamard,
                                  job.nvfp4_head_scales[head], job.nvfp4_payload + slot * (PAYLOAD_BYTES / 2),
                                  shared.nvfp4);
        }
      }
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  if constexpr (nvfp4::AVAILABLE<D>) {
    const int u = R::warp() - (R::WARPS - D / 64);
    if (job.nvfp4_payload != nullptr && u >= 0) {
      ptx::st_global_v4(job.nvfp4_scales + slot * (8 * D) + u * layout::SCALE_TILE_BYTES + 16 * lane,
                        make_uint4(shared.nvfp4[lane][u], shared.nvfp4[lane + 32][u], shared.nvfp4[lane + 64][u],
                                   shared.nvfp4[lane + 96][u]));
    }
  }
}

// ---- token blocks of 32, and the same tokens in blocks of 1 ----------------------------------------------------

__device__ __forceinline__ void quantize_by_block(const Job& job, int head, const layout::Tile& tile, int64_t slot,
                                                  Shared& shared) {
  const int warp = R::warp(), lane = threadIdx.x % 32;
  uint4 piece[R::STEPS][R::PER_LANE];
  R::load(piece, job.source, tile, head, 0);

  uint32_t amax = 0, lost_steps = 0;  // of the warp's finite tokens, as bits of a float32
#pragma unroll
  for (int step = 0; step < R::STEPS; ++step) {
    const TokenScale scale = find_scale(piece[step]);
    amax = max(amax, __float_as_uint(scale.amax));
    lost_steps |= uint32_t(scale.lost) << step;
    if (job.payload != nullptr) quantize_tokens(job, slot, piece[step], step, scale, shared);
  }
  uint32_t lost = lost_steps != 0;
#pragma unroll
  for (int lanes = R::LANES; lanes < 32; lanes *= 2) {
    amax = max(amax, ptx::shfl_bfly(amax, lanes));
    lost |= ptx::shfl_bfly(lost, lanes);
  }
  if (lane == 0) {
    shared.amax[warp] = amax;
    shared.lost[warp] = lost;
  }
  __syncthreads();

  const float largest = __uint_as_float(R::over_block(shared.amax, warp / R::WARPS_PER_BLOCK));
  const uint32_t byte = formats::rceil_e4m3(largest);
#pragma unroll
  for (int step = 0; step < R::STEPS; ++step) {
    store_step(job.block_payload + slot * PAYLOAD_BYTES, piece[step], step, byte, lost_steps >> step & 1);
  }
  if (warp == 2) {
    uint32_t bytes[layout::BLOCKS], word = 0;
#pragma unroll
    for (int b = 0; b < layout::BLOCKS; ++b) {
      const uint32_t finite = formats::rceil_e4m3(__uint_as_float(R::over_block(shared.amax, b)));
      const uint32_t of_block = R::over_block(shared.lost, b) ? formats::E8M0_NAN : finite;
      bytes[b] = layout::BLOCK * b + lane < tile.rows ? of_block : 0;
      word |= (layout::BLOCK * b < tile.rows ? of_block : 0) << 8 * b;
    }
    if (job.block_scales != nullptr) store_block_scales<D>(job.block_scales + slot * SCALE_BYTES, bytes, lane);
    if (job.block_token_scales != nullptr) {
      store_token_scales<D>(job.block_token_scales + slot * SCALE_BYTES, word, lane);
    }
  }
}

// ---- the tiles of a launch -------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(R::THREADS, CTAS) quantize(const __grid_constant__ QuantizeParams p) {
  // Two, so that one barrier per tile is enough: what a tile writes is read before the barrier of the next one.
  __shared__ Shared both[2];
  const int warp = R::warp(), lane = threadIdx.x % 32;
  const uint32_t heads = p.total_heads, units = uint32_t(p.status[layout::NUM_TILES]) * heads;
  int parity = 0;
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x, parity ^= 1) {
    const uint32_t index = unit / heads;
    int head = unit % heads, j = 0;
    while (head >= p.jobs[j].heads) head -= p.jobs[j++].heads;
    const Job& job = p.jobs[j];
    const layout::Tile tile = p.tiles[index];
    const int64_t slot = head * p.max_tiles + index;
    Shared& shared = both[parity];
    if (job.block_payload != nullptr) {
      quantize_by_block(job, head, tile, slot, shared);
    } else {
      quantize_by_token(job, head, tile, slot, shared);
    }
    if (warp == 0 && job.payload != nullptr) store_channel_scales<D>(job.scales + slot * SCALE_BYTES, shared.byte, lane);
    if (warp == 1 && job.exponents != nullptr) {
#pragma unroll
      for (int row = lane; row < layout::TILE; row += 32) {
        const uint32_t byte = shared.byte[row];
        const float exponent = byte == formats::E8M0_NAN ? __uint_as_float(0x7FC00000u) : float(int(byte) - 127);
        job.exponents[slot * layout::TILE + row] = shared.zero[row] ? ZERO_TOKEN_EXPONENT : exponent;
      }
    }
  }
  clear_padding(p.padding, p.status);
}
