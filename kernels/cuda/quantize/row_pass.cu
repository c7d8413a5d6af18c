// The row pre-pass of the backward in one pass over dout and out: the CUDA form of
// flamia.reference.backward.row_pass, whose Note [Backward] defines inactive and lost rows.
//
// A CTA takes one tile of 128 query rows of one head (Note [Lanes of a token]): dO' = fl(dO * fl(1 / l)) in token
// blocks of 32, and delta_i = sum_d dO'q_id * out_id with the quantized dO', as a binary tree over the channels.
#include "common/padding.cuh"
#include "common/tokens.cuh"

struct RowPassParams {
  Tokens dout;
  Tokens out;
  const float* row_sum;  // l (heads, T)
  int64_t row_sum_stride;
  const float* row_max;  // m (heads, T)
  int64_t row_max_stride;
  uint8_t* payload;       // (heads, max_tiles, 128 D)
  uint8_t* scales;        // (heads, max_tiles, 512 ceil(D / 128)), contraction over channels
  uint8_t* token_scales;  // as scales, contraction over tokens
  float* delta;           // (heads, max_tiles, 128)
  float* top;             // as delta: m, +inf in inactive rows, NaN in lost ones
  Padding padding;
  const layout::Tile* tiles;
  const int32_t* status;
  int64_t max_tiles;
  int32_t heads;
  int32_t unused;
};
static_assert(sizeof(RowPassParams) == PARAMS_BYTES, "RowPassParams must match structs.ROW_PASS");

using R = Rows<formats::Given, HEAD_DIM>;
constexpr int D = R::D;
constexpr int SCALE_BYTES = (D + 127) / 128 * layout::SCALE_TILE_BYTES;

struct alignas(16) Shared {
  uint32_t amax[R::WARPS];     // of the rows of each warp, as bits of a float32
  float delta[layout::TILE];
  float top[layout::TILE];
};

// The sum of a lane's products as a tree of adjacent pairs.
template <int N>
__device__ __forceinline__ float sum_pairs(const float (&x)[N]) {
  float y[N];
#pragma unroll
  for (int i = 0; i < N; ++i) y[i] = x[i];
#pragma unroll
  for (int n = N; n > 1; n /= 2) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) y[i] = __fadd_rn(y[2 * i], y[2 * i + 1]);
  }
  return y[0];
}

__device__ __forceinline__ void row_pass_tile(const RowPassParams& p, int head, const layout::Tile& tile, int64_t slot,
                                              Shared& shared) {
  const int warp = R::warp(), lane = threadIdx.x % 32;

  // ---- read --------------------------------------------------------------------------------------------------
  uint4 dout[R::STEPS][R::PER_LANE];
  float inverse[R::STEPS];  // fl(1 / l)
  R::load(dout, p.dout, tile, head, 0);
#pragma unroll
  for (int step = 0; step < R::STEPS; ++step) {
    const int row = R::row(step);
    inverse[step] = row < tile.rows ? p.row_sum[head * p.row_sum_stride + tile.start + row] : 1.0f;
  }

  // ---- the block's maximum over rows that are neither inactive nor lost --------------------------------------
  uint32_t warp_amax = 0, zero_steps = 0, lost_steps = 0;
#pragma unroll
  for (int step = 0; step < R::STEPS; ++step) {
    inverse[step] = ptx::rcp_rn_f32(inverse[step]);
    uint32_t given = 0, scaled = 0;
#pragma unroll
    for (int q = 0; q < R::PER_LANE; ++q) {
#pragma unroll
      for (int i = 0; i < R::VALUES; ++i) {
        const float x = R::widen(dout[step][q], i);
        given |= __float_as_uint(x) & formats::MAGNITUDE;
        if (R::has_piece(q)) scaled = max(scaled, __float_as_uint(__fmul_rn(x, inverse[step])) & formats::MAGNITUDE);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < R::LANES; lanes *= 2) {
      given |= ptx::shfl_bfly(given, lanes);
      scaled = max(scaled, ptx::shfl_bfly(scaled, lanes));
    }
    const bool zero = given == 0, lost = scaled >= formats::EXPONENT;
    zero_steps |= uint32_t(zero) << step;
    lost_steps |= uint32_t(lost) << step;
    if (!zero && !lost) warp_amax = max(warp_amax, scaled);
  }
#pragma unroll
  for (int lanes = R::LANES; lanes < 32; lanes *= 2) warp_amax = max(warp_amax, ptx::shfl_bfly(warp_amax, lanes));
  if (lane == 0) shared.amax[warp] = warp_amax;
  __syncthreads();

  // ---- quantize, and delta of the quantized row --------------------------------------------------------------
  const float largest = __uint_as_float(R::over_block(shared.amax, warp / R::WARPS_PER_BLOCK));
  const uint32_t byte = formats::rceil_e4m3(largest);
  const float factor = formats::inverse_e8m0(byte), scale = formats::decode_e8m0(byte);
  constexpr int WANTED = R::PER_LANE == 1 ? 4 : 2, GROUP = R::STEPS < WANTED ? R::STEPS : WANTED;
  uint4 out[GROUP][R::PER_LANE];
#pragma unroll
  for (int step = 0; step < R::STEPS; ++step) {
    const int row = R::row(step);
    const bool zero = zero_steps >> step & 1, lost = lost_steps >> step & 1;
    if (step % GROUP == 0) R::load(out, p.out, tile, head, step);
    float sum[R::PER_LANE];
    uint32_t any = 0;
#pragma unroll
    for (int q = 0; q < R::PER_LANE; ++q) {
      float x[R::VALUES], product[R::VALUES];
      widen_piece<R>(x, dout[step][q]);
#pragma unroll
      for (int i = 0; i < R::VALUES; ++i) x[i] = __fmul_rn(x[i], inverse[step]);
      uint32_t codes[R::VALUES / 4];
      encode_piece<R>(codes, x, factor, zero || lost);
      if (R::has_piece(q)) store_codes<R>(p.payload + slot * (layout::TILE * D), row, R::channel(q), codes);
#pragma unroll
      for (int i = 0; i < R::VALUES; i += 2) {
        const uint32_t pair = codes[i / 4] >> 8 * (i % 4);
        const float2 value = formats::decode_e4m3x2(pair);
        product[i] = __fmul_rn(__fmul_rn(value.x, scale), R::widen(out[step % GROUP][q], i));
        product[i + 1] = __fmul_rn(__fmul_rn(value.y, scale), R::widen(out[step % GROUP][q], i + 1));
      }
#pragma unroll
      for (int i = 0; i < R::VALUES / 4; ++i) any |= codes[i] & 0x7F7F7F7Fu;
      sum[q] = R::has_piece(q) ? sum_pairs(product) : 0.0f;
    }
#pragma unroll
    for (int lanes = 1; lanes < R::LANES; lanes *= 2) {
      any |= ptx::shfl_bfly(any, lanes);
#pragma unroll
      for (int q = 0; q < R::PER_LANE; ++q) {
        sum[q] = __fadd_rn(sum[q], __uint_as_float(ptx::shfl_bfly(__float_as_uint(sum[q]), lanes)));
      }
    }
    if (R::lane() == 0) {
      const bool inactive = zero || (!lost && any == 0);
      float top = __uint_as_float(lost ? 0x7FC00000u : 0x7F800000u);
      if (!inactive && !lost) top = p.row_max[head * p.row_max_stride + tile.start + row];
      shared.delta[row] = inactive ? 0.0f : sum_pairs(sum);
      shared.top[row] = inactive ? __uint_as_float(0x7F800000u) : top;
    }
  }

  // ---- scale tiles and row values, a warp each ---------------------------------------------------------------
  if (warp == 0) {
    uint32_t row_byte[layout::BLOCKS], word = 0;
#pragma unroll
    for (int b = 0; b < layout::BLOCKS; ++b) {
      const uint32_t of_block = formats::rceil_e4m3(__uint_as_float(R::over_block(shared.amax, b)));
      row_byte[b] = layout::BLOCK * b + lane < tile.rows ? of_block : 0;
      word |= (layout::BLOCK * b < tile.rows ? of_block : 0) << 8 * b;
    }
    store_block_scales<D>(p.scales + slot * SCALE_BYTES, row_byte, lane);
    store_token_scales<D>(p.token_scales + slot * SCALE_BYTES, word, lane);
  }
  __syncthreads();
  if (threadIdx.x < layout::TILE) {
    p.delta[slot * layout::TILE + threadIdx.x] = shared.delta[threadIdx.x];
    p.top[slot * layout::TILE + threadIdx.x] = shared.top[threadIdx.x];
  }
}

extern "C" __global__ void __launch_bounds__(R::THREADS, R::WARPS == 8 ? 2 : 1)
    row_pass(const __grid_constant__ RowPassParams p) {
  // Two, so that what a tile writes last is read before the first barrier of the next one.
  __shared__ Shared shared[2];
  const uint32_t heads = p.heads, units = uint32_t(p.status[layout::NUM_TILES]) * heads;
  int parity = 0;
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x, parity ^= 1) {
    const uint32_t index = unit / heads, head = unit % heads;
    row_pass_tile(p, head, p.tiles[index], head * p.max_tiles + index, shared[parity]);
  }
  clear_padding(p.padding, p.status);
}
