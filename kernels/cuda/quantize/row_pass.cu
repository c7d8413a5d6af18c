// The row pre-pass of the backward in one pass over dout and out: the CUDA form of
// flamia.reference.backward.row_pass, whose Note [Backward] defines inactive and lost rows.
//
// A CTA takes one tile of 128 query rows of one head (Note [Lanes of a token]): dO' = fl(dO * fl(1 / l)) in token
// blocks of 32, and delta_i = sum_d dO'q_id * out_id with the quantized dO', as a binary tree over the channels.
#include "common/padding.cuh"
#include "common/tokens.cuh"
#include "quantize/wide.cuh"

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
  uint8_t* wide;          // (heads, max_tiles, 256 D), Note [Wide tile]: dO', on Hopper
  Padding padding;
  const layout::Tile* tiles;
  const int32_t* status;
  int64_t max_tiles;
  int32_t heads;
  int32_t unused;
};
static_assert(sizeof(RowPassParams) == PARAMS_BYTES, "RowPassParams must match structs.ROW_PASS");

// Where both tensors fit into a stage, both are staged; else out is read where it is needed.
constexpr bool STAGE_OUT = HEAD_DIM * formats::Given::BYTES <= 512;
using R = Rows<formats::Given, HEAD_DIM, STAGE_OUT ? 2 : 1>;
constexpr int STAGE_PIECES = R::STAGE_PIECES * (STAGE_OUT ? 2 : 1);
constexpr int D = R::D;
constexpr int SCALE_BYTES = (D + 127) / 128 * layout::SCALE_TILE_BYTES;

// CTAs per multiprocessor, by their shared memory; this bounds the registers.
constexpr int CTAS = R::TOKEN_BYTES <= 128 ? 4 : R::TOKEN_BYTES <= 256 ? 3 : 1;
extern "C" __constant__ const int row_pass_shared_bytes = R::STAGES * STAGE_PIECES * 16;

struct alignas(16) Shared {
  float row_sum[layout::TILE];
  float row_max[layout::TILE];
  uint32_t amax[R::WARPS];  // of the rows of each warp, as bits of a float32
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

// Start to fetch l and m of the row that this lane owns, for itself.
__device__ __forceinline__ void fetch_rows(const RowPassParams& p, int head, const layout::Tile& tile, Shared& shared) {
  const int row = R::owned_row();
  if (!R::is_first_owner() || row >= tile.rows) return;
  const int64_t token = int64_t(tile.start) + row;
  const uint32_t sum = uint32_t(__cvta_generic_to_shared(&shared.row_sum[row]));
  const uint32_t top = uint32_t(__cvta_generic_to_shared(&shared.row_max[row]));
  ptx::cp_async_ca_4(sum, p.row_sum + head * p.row_sum_stride + token);
  ptx::cp_async_ca_4(top, p.row_max + head * p.row_max_stride + token);
}

// What becomes of dO'.
enum Form {
  CODES,     // payload and scale tiles
  WIDE,      // these and wide tiles: Note [Halves with tokens]
  UNSCALED,  // wide tiles alone, of numbers rounded to bfloat16; the bytes of `scales` only bound them
};

// Quantize a piece of dO' to E4M3, store it, and leave the numbers that it stands for. Whether one of them is not zero.
template <Form FORM>
__device__ __forceinline__ bool put_codes(const RowPassParams& p, int64_t slot, int row, int channel, bool stored,
                                          float (&x)[R::VALUES], float factor, float scale) {
  uint32_t codes[R::VALUES / 4], any = 0;
  encode_piece<R>(codes, x, factor);
  if (stored) {
    store_codes<R>(p.payload + slot * (layout::TILE * D), row, channel, codes);
    if constexpr (FORM == WIDE) store_wide<R>(p.wide + slot * (layout::TILE * 2 * D), row, channel, codes, scale);
  }
#pragma unroll
  for (int i = 0; i < R::VALUES; i += 2) {
    const float2 value = formats::decode_e4m3x2(codes[i / 4] >> 8 * (i % 4));
    x[i] = __fmul_rn(value.x, scale);
    x[i + 1] = __fmul_rn(value.y, scale);
  }
#pragma unroll
  for (int i = 0; i < R::VALUES / 4; ++i) any |= codes[i] & 0x7F7F7F7Fu;
  return any != 0;
}

// The same in bfloat16; zeros if `found` is 0.
__device__ __forceinline__ bool put_unscaled(const RowPassParams& p, int64_t slot, int row, int channel, bool stored,
                                             float (&x)[R::VALUES], float found) {
  uint32_t words[R::VALUES / 2], any = 0;
#pragma unroll
  for (int i = 0; i < R::VALUES / 2; ++i) {
    words[i] = ptx::cvt_rn_bf16x2_f32(x[2 * i + 1], x[2 * i]);
    words[i] = found == 0.0f ? 0 : words[i];
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    any |= words[i] & 0x7FFF7FFFu;
  }
  if (stored) store_pairs<R>(p.wide + slot * (layout::TILE * 2 * D), row, channel, words);
  return any != 0;
}

template <Form FORM>
__device__ __forceinline__ void row_pass_tile(const RowPassParams& p, int head, const layout::Tile& tile, int64_t slot,
                                              const uint4* stage, Shared& shared) {
  const int warp = R::warp(), lane = threadIdx.x % 32;

  // ---- rows: each lane for the one that it owns --------------------------------------------------------------
  // Rounding is monotone: the largest |fl(x * inverse)| is fl(largest |x| * inverse), and it is not finite exactly if
  // one of the products is not, unless dO is all zero, which makes the row inactive before anything else.
  uint32_t packed[R::STEPS];
#pragma unroll
  for (int step = 0; step < R::STEPS; ++step) {
    uint4 dout[R::PER_LANE];
    R::read(dout, stage, step);
    packed[step] = R::piece_amax(dout);
  }
  const uint32_t given = R::owned_amax(packed);
  const int row = R::owned_row();
  const bool used = row < tile.rows;
  // Of the lanes that own a row, the first fetched l; the others get it from there.
  const float row_sum = used && R::is_first_owner() ? shared.row_sum[row] : 1.0f;
  float inverse = ptx::rcp_rn_f32(row_sum);  // fl(1 / l)
  inverse = __uint_as_float(R::from_owner(__float_as_uint(inverse), threadIdx.x % R::STEPS));
  float of_row = __fmul_rn(R::Element::widen(given), inverse);
  if constexpr (FORM == UNSCALED) of_row = __uint_as_float(ptx::cvt_rn_bf16_f32(of_row) << 16);
  const uint32_t scaled = __float_as_uint(of_row) & formats::MAGNITUDE;
  const bool zero = given == 0, lost = !zero && scaled >= formats::EXPONENT;
  const uint32_t warp_amax = ptx::redux_max_u32(zero || lost ? 0 : scaled);
  if (lane == 0) shared.amax[warp] = warp_amax;
  __syncthreads();

  // ---- quantize, and delta of the quantized row --------------------------------------------------------------
  const float largest = __uint_as_float(R::over_block(shared.amax, warp / R::WARPS_PER_BLOCK));
  const uint32_t byte = formats::rceil_e4m3(largest);
  const float scale = formats::decode_e8m0(byte), owned_factor = zero || lost ? 0.0f : formats::inverse_e8m0(byte);
  uint32_t delta_of[R::STEPS], any_of = 0;
  [[maybe_unused]] uint32_t second_of[R::STEPS];
#pragma unroll
  for (int step = 0; step < R::STEPS; ++step) {
    const float times = __uint_as_float(R::from_owner(__float_as_uint(inverse), step));
    const float factor = __uint_as_float(R::from_owner(__float_as_uint(owned_factor), step));
    uint4 dout[R::PER_LANE], out[R::PER_LANE];
    R::read(dout, stage, step);
    if constexpr (STAGE_OUT) {
      R::read(out, stage + R::STAGE_PIECES, step);
    } else {
      R::load_step(out, p.out, tile, head, step);
    }
    float sum[R::PER_LANE];
    bool any = false;
#pragma unroll
    for (int q = 0; q < R::PER_LANE; ++q) {
      float x[R::VALUES], product[R::VALUES];
      widen_piece<R>(x, dout[q]);
#pragma unroll
      for (int i = 0; i < R::VALUES; ++i) x[i] = __fmul_rn(x[i], times);
      const int row = R::row(step), channel = R::channel(q);
      const bool stored = R::has_piece(q) && (FORM == CODES || in_used_half(row, tile.rows));
      if constexpr (FORM == UNSCALED) {
        any |= put_unscaled(p, slot, row, channel, stored, x, factor);
      } else {
        any |= put_codes<FORM>(p, slot, row, channel, stored, x, factor, scale);
      }
#pragma unroll
      for (int i = 0; i < R::VALUES; ++i) product[i] = __fmul_rn(x[i], R::widen(out[q], i));
      sum[q] = R::has_piece(q) ? sum_pairs(product) : 0.0f;
    }
    if (R::of_token(ptx::vote_ballot(any))) any_of |= 1u << step;
    delta_of[step] = __float_as_uint(sum[0]);
    if constexpr (R::PER_LANE == 2) second_of[step] = __float_as_uint(sum[1]);
  }
  const auto add = [](uint32_t a, uint32_t b) {
    return __float_as_uint(__fadd_rn(__uint_as_float(a), __uint_as_float(b)));
  };
  float delta = __uint_as_float(R::reduce(delta_of, add));
  if constexpr (R::PER_LANE == 2) delta = __fadd_rn(delta, __uint_as_float(R::reduce(second_of, add)));
  if (R::is_first_owner()) {
    const bool inactive = !used || zero || (!lost && !(any_of >> threadIdx.x % R::STEPS & 1));
    float top = __uint_as_float(0x7F800000u);  // +inf
    if (!inactive) top = lost ? __uint_as_float(0x7FC00000u) : shared.row_max[row];
    p.delta[slot * layout::TILE + row] = inactive ? 0.0f : delta;
    p.top[slot * layout::TILE + row] = top;
  }

  // ---- scale tiles -------------------------------------------------------------------------------------------
  if (warp == 0) {
    uint32_t bytes[layout::BLOCKS], word = 0;
#pragma unroll
    for (int b = 0; b < layout::BLOCKS; ++b) {
      const uint32_t of_block = formats::rceil_e4m3(__uint_as_float(R::over_block(shared.amax, b)));
      bytes[b] = layout::BLOCK * b + lane < tile.rows ? of_block : 0;
      word |= (layout::BLOCK * b < tile.rows ? of_block : 0) << 8 * b;
    }
    store_block_scales<D>(p.scales + slot * SCALE_BYTES, bytes, lane);
    if constexpr (FORM != UNSCALED) store_token_scales<D>(p.token_scales + slot * SCALE_BYTES, word, lane);
  }
}

template <Form FORM>
__device__ __forceinline__ void pass_rows(const RowPassParams& p) {
  extern __shared__ uint4 stages[];
  // Two: while a tile is worked on, l and m of the next one arrive, and one barrier per tile is enough.
  __shared__ Shared shared[2];
  for_each_unit<R, STAGE_PIECES>(
      Units(p.status[layout::NUM_TILES], p.heads), p.tiles, stages,
      [&](const Unit& unit, const layout::Tile& tile, uint4* stage, int parity) {
        R::fetch(stage, p.dout, tile, unit.head);
        if constexpr (STAGE_OUT) R::fetch(stage + R::STAGE_PIECES, p.out, tile, unit.head);
        fetch_rows(p, unit.head, tile, shared[parity]);
      },
      [&](const Unit& unit, const layout::Tile& tile, const uint4* stage, int parity) {
        row_pass_tile<FORM>(p, unit.head, tile, unit.head * p.max_tiles + unit.tile, stage, shared[parity]);
      });
  clear_padding(p.padding, p.status);
}

extern "C" __global__ void __launch_bounds__(R::THREADS, CTAS) row_pass(const __grid_constant__ RowPassParams p) {
  pass_rows<CODES>(p);
}

// The same with dO' as wide tiles, for the backward on Hopper alone: Note [Halves with tokens] of wide.cuh.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
extern "C" __constant__ const int row_pass_wide_shared_bytes = R::STAGES * STAGE_PIECES * 16;
extern "C" __global__ void __launch_bounds__(R::THREADS, CTAS) row_pass_wide(const __grid_constant__ RowPassParams p) {
  pass_rows<WIDE>(p);
}

// The same of an unscaled recipe.
extern "C" __constant__ const int row_pass_unscaled_shared_bytes = R::STAGES * STAGE_PIECES * 16;
extern "C" __global__ void __launch_bounds__(R::THREADS, CTAS) row_pass_unscaled(const __grid_constant__ RowPassParams p) {
  pass_rows<UNSCALED>(p);
}
#endif
