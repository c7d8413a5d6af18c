// Operands of the Hopper kernels that the quantizer's tiles do not hold: wide copies of payloads (Note [Wide tile]),
// and factor tiles of unscaled keys.
#include "common/tokens.cuh"
#include "hopper/factors.cuh"
#include "hopper/ptx.cuh"

// One tensor: from payload tiles to wide tiles of their values, with zeros for a lost token.
struct WidenJob {
  const uint8_t* payload;  // (heads, max_tiles, 128 D), E4M3
  const uint8_t* scales;   // (heads, max_tiles, 512), contraction over channels; or null
  const float* exponents;  // (heads, max_tiles, 128), without scales
  uint8_t* wide;           // (heads, max_tiles, 256 D)
  int32_t heads;
  int32_t unused;
};

struct OperandsParams {
  WidenJob jobs[4];
  const float* k_exponents;  // (kv_heads, max_tiles, 128)
  const float* v_exponents;  // (kv_heads, max_tiles, 128)
  float* factors;            // (kv_heads, max_tiles, 132)
  const layout::Tile* tiles;
  const int32_t* status;
  int64_t max_tiles;
  int32_t kv_heads;     // 0: no factor tiles
  int32_t total_heads;  // of all jobs
};
static_assert(sizeof(OperandsParams) == PARAMS_BYTES, "OperandsParams must match structs.OPERANDS");

constexpr int D = HEAD_DIM;
constexpr int THREADS = 256;
constexpr int PIECES = D / 16;  // of 16 codes in a row
static_assert(D == 64 || D == 128, "the Hopper kernels take head_dim 64 and 128");

__device__ __forceinline__ uint32_t widen_pair(uint32_t codes, float factor) {
  const float2 x = formats::decode_e4m3x2(codes);
  return ptx::cvt_rn_bf16x2_f32(__fmul_rn(x.y, factor), __fmul_rn(x.x, factor));
}

// All loads first, so that they are under way together.
__device__ __forceinline__ void widen_tile(const WidenJob& job, int64_t slot) {
  const uint8_t* const from = job.payload + slot * (layout::TILE * D);
  uint8_t* const to = job.wide + slot * (layout::TILE * 2 * D);
  constexpr int STEPS = layout::TILE * PIECES / THREADS, ROWS = THREADS / PIECES;
  const int first = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
  uint4 codes[STEPS];
  uint32_t byte[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int row = first + i * ROWS;
    codes[i] = ptx::ld_global_nc_v4(from + layout::payload_offset<D>(row, 16 * piece));
    if (job.scales != nullptr) {
      byte[i] = job.scales[slot * layout::SCALE_TILE_BYTES + layout::scale_offset(row, 0)];
    } else {
      const float e = job.exponents[slot * layout::TILE + row];
      byte[i] = e == e ? int(e) + 127 : formats::E8M0_NAN;
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int row = first + i * ROWS;
    const bool lost = byte[i] == formats::E8M0_NAN;  // then the codes may be NaN
    const float factor = formats::decode_e8m0(byte[i]);
    const uint32_t word[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
    uint32_t pair[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) pair[j] = lost ? 0 : widen_pair(word[j / 2] >> 16 * (j % 2) & 0xFFFF, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::st_global_v4(to + layout::payload_offset<2 * D>(row, 32 * piece + 16 * half),
                        make_uint4(pair[4 * half], pair[4 * half + 1], pair[4 * half + 2], pair[4 * half + 3]));
    }
  }
}

// By one warp.
__device__ __forceinline__ void write_factors(const OperandsParams& p, const layout::Tile& tile, int64_t slot,
                                              int lane) {
  float of_k[layout::BLOCKS];
  bool lost[layout::BLOCKS];
#pragma unroll
  for (int b = 0; b < layout::BLOCKS; ++b) {
    const int row = layout::BLOCK * b + lane;
    const float of_v = p.v_exponents[slot * layout::TILE + row];
    of_k[b] = p.k_exponents[slot * layout::TILE + row];
    lost[b] = row < tile.rows && of_v != of_v;
  }
  float* const to = p.factors + slot * hopper::FACTOR_WORDS;
  hopper::write_key_factors(to, of_k, tile.rows, false);
  hopper::write_lost_values(to, lost);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) make_operands(const __grid_constant__ OperandsParams p) {
  const uint32_t heads = p.total_heads + p.kv_heads, units = uint32_t(p.status[layout::NUM_TILES]) * heads;
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const uint32_t index = unit / heads;
    int head = unit % heads, job = 0;
    if (head < p.kv_heads) {
      if (threadIdx.x < 32) write_factors(p, p.tiles[index], head * p.max_tiles + index, threadIdx.x);
      continue;
    }
    head -= p.kv_heads;
    while (head >= p.jobs[job].heads) head -= p.jobs[job++].heads;
    widen_tile(p.jobs[job], head * p.max_tiles + index);
  }
}
