// Operands of the Hopper kernels that the quantizer's tiles do not hold: wide copies of payloads (Note [Wide tile]),
// and what one key tile has to tell beside its payload.
//
// Note [Factor tile]
// ~~~~~~~~~~~~~~~~~~
// For every tile of K, 132 words: the scale of each key as FP32, NaN for a lost key and past the document, so that
// such a key hides itself (Note [Floor by a magic addend]); the first lost token of K and of V, 128 without one; the
// largest exponent of K; whether an exponent is so far from 0 that the kernels take their slow path. A row that sees a
// lost token is set to NaN in the end: no NaN is ever multiplied.
//
// Note [Fold tile]
// ~~~~~~~~~~~~~~~~
// For every tile of V1, 256 words: 2^e of each token with its exponent e, then the largest e of its 32-token block up to
// it. So E_ib of flamia.reference.probabilities.fold_values is the second at the last token of block b that row i sees.
#include "common/tokens.cuh"
#include "hopper/factors.cuh"
#include "hopper/ptx.cuh"

// One tensor: from payload tiles to wide tiles.
struct WidenJob {
  const uint8_t* payload;  // (heads, max_tiles, 128 D), E4M3
  const uint8_t* scales;   // (heads, max_tiles, 512), contraction over channels; null: the codes as they are
  uint8_t* wide;           // (heads, max_tiles, 256 D)
  int32_t heads;
  int32_t unused;
};

struct OperandsParams {
  WidenJob jobs[4];
  const float* k_exponents;  // (kv_heads, max_tiles, 128)
  const uint8_t* v_scales;   // (kv_heads, max_tiles, 512), one byte per token: of V1 if there is one, else of V32
  const float* v_exponents;  // (kv_heads, max_tiles, 128), in place of v_scales: the operands are unscaled
  float* factors;            // (kv_heads, max_tiles, 132)
  float* fold;               // (kv_heads, max_tiles, 256); null if nothing is folded
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
    byte[i] = 127;
    if (job.scales != nullptr) byte[i] = job.scales[slot * layout::SCALE_TILE_BYTES + layout::scale_offset(row, 0)];
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int row = first + i * ROWS;
    const float factor = byte[i] == formats::E8M0_NAN ? 1.0f : formats::decode_e8m0(byte[i]);
    const uint32_t word[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
    uint32_t pair[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) pair[j] = widen_pair(word[j / 2] >> 16 * (j % 2) & 0xFFFF, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      ptx::st_global_v4(to + layout::payload_offset<2 * D>(row, 32 * piece + 16 * half),
                        make_uint4(pair[4 * half], pair[4 * half + 1], pair[4 * half + 2], pair[4 * half + 3]));
    }
  }
}

// The first of the 128 tokens for which a lane says so, each lane for the tokens 32 b + lane; 128 without one.
__device__ __forceinline__ int first_of(const bool (&is)[layout::BLOCKS]) {
  int first = layout::TILE;
#pragma unroll
  for (int b = layout::BLOCKS - 1; b >= 0; --b) {
    const uint32_t ballot = ptx::vote_ballot(is[b]);
    if (ballot) first = layout::BLOCK * b + __ffs(ballot) - 1;
  }
  return first;
}

// By one warp.
__device__ __forceinline__ void write_factors(const OperandsParams& p, const layout::Tile& tile, int64_t slot,
                                              int lane) {
  bool lost_k[layout::BLOCKS], lost_v[layout::BLOCKS], extreme = false;
  float largest = -127.0f;
  float* const to = p.factors + slot * hopper::FACTOR_WORDS;
#pragma unroll
  for (int b = 0; b < layout::BLOCKS; ++b) {
    const int row = layout::BLOCK * b + lane;
    const float e = p.k_exponents[slot * layout::TILE + row];
    const bool used = row < tile.rows, scaled = p.v_scales != nullptr;
    uint32_t byte = formats::E8M0_NAN;
    if (scaled) {
      byte = p.v_scales[slot * layout::SCALE_TILE_BYTES + layout::scale_offset(row, 0)];
    } else {
      const float of_v = p.v_exponents[slot * layout::TILE + row];
      if (of_v == of_v) byte = 127;
    }
    lost_k[b] = used && e != e;
    lost_v[b] = used && byte == formats::E8M0_NAN;
    const bool known = used && e == e;
    if (known) {
      largest = fmaxf(largest, e);
      extreme |= scaled && fabsf(e) > hopper::USUAL_EXPONENT;
    }
    to[row] = !known ? __uint_as_float(0x7FC00000u) : scaled ? formats::decode_e8m0(uint32_t(int(e) + 127)) : 1.0f;
    if (p.fold != nullptr) {
      float* const fold = p.fold + slot * hopper::FOLD_WORDS;
      const float own = byte == formats::E8M0_NAN ? -127.0f : float(int(byte) - 127);
      float prefix = own;
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const float below = __uint_as_float(ptx::shfl_up(__float_as_uint(prefix), lanes));
        if (lane >= lanes) prefix = fmaxf(prefix, below);
      }
      fold[row] = formats::decode_e8m0(uint32_t(int(own) + 127));
      fold[layout::TILE + row] = prefix;
    }
  }
  const int first_k = first_of(lost_k), first_v = first_of(lost_v);
  const uint32_t top = ptx::redux_max_u32(uint32_t(int(largest) + 127));
  const bool far = ptx::vote_ballot(extreme) != 0;
  if (lane == 0) {
    ptx::st_global_v4(to + layout::TILE,
                      make_uint4(first_k, first_v, __float_as_uint(float(int(top) - 127)), uint32_t(far)));
  }
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
