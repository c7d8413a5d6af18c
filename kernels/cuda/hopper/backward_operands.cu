// What the backward needs of a tile of queries or keys beside what is saved: Note [Columns]; where they are copied, of
// queries their values in bfloat16 too, Note [Wide tile].
#include "hopper/backward.cuh"
#include "quantize/wide.cuh"

using namespace backward;

constexpr int PER_TILE = COPIED ? 256 : TILE;  // threads
constexpr int PIECES = D / 8;  // of 8 codes in a row
constexpr int ROWS = PER_TILE / PIECES, PARTS = TILE / ROWS;
static_assert(STEP % ROWS == 0, "the rows of a part are of one half");

// ---- wide tiles ------------------------------------------------------------------------------------------------

// A thread's codes of a tile: a piece in each of some rows. Note [Halves with tokens].
struct Codes {
  uint2 codes[PARTS];
  int rows;  // of the tile
  __device__ __forceinline__ static int row(int i) { return i * ROWS + threadIdx.x / PIECES; }
  __device__ __forceinline__ Codes(const uint8_t* tile, int rows) : rows(rows) {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      if (!in_used_half(i * ROWS, rows)) break;
      codes[i] = ptx::ld_global_nc_v2(tile + layout::payload_offset<D>(row(i), threadIdx.x % PIECES * 8));
    }
  }
  // The values, saturated, given the exponents of the 128 tokens; zeros for a lost token, whose codes may be NaN.
  __device__ __forceinline__ void store(uint8_t* tile, const float* exponents) const {
#pragma unroll
    for (int i = 0; i < PARTS; ++i) {
      if (!in_used_half(i * ROWS, rows)) break;
      const float e = exponents[row(i)], factor = exp2_scale(e);
      uint32_t pair[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = formats::decode_e4m3x2((j < 2 ? codes[i].x : codes[i].y) >> 16 * (j % 2) & 0xFFFF);
        pair[j] = e == e ? ptx::cvt_rn_satfinite_bf16x2_f32(__fmul_rn(x.y, factor), __fmul_rn(x.x, factor)) : 0;
      }
      ptx::st_global_v4(tile + layout::payload_offset<2 * D>(row(i), threadIdx.x % PIECES * 16),
                        make_uint4(pair[0], pair[1], pair[2], pair[3]));
    }
  }
};

// ---- columns: a thread for each token --------------------------------------------------------------------------

// Flags of a block of 32 tokens, a warp's.
__device__ __forceinline__ uint32_t flags_of(bool usual) { return ptx::vote_any(!usual) ? SLOW : 0; }

__device__ __forceinline__ void write_query(const BackwardParams& p, int64_t slot, int row) {
  QueryColumns& to = *reinterpret_cast<QueryColumns*>(p.q_columns + (2 * slot + row / STEP) * sizeof(QueryColumns));
  const float e = p.q_exponents[slot * TILE + row], top = p.top[slot * TILE + row], delta = p.delta[slot * TILE + row];
  const uint32_t byte = p.dout_scales[slot * layout::SCALE_TILE_BYTES + layout::scale_offset(row / 32 * 32, 0)];
  const bool active = top != infinity();
  float* const score = reinterpret_cast<float*>(to.score + row % STEP / 2) + row % 2;
  score[0] = __fmul_rn(__fmul_rn(p.c, token_scale(e)), hopper::UNIT);
  score[2] = hopper::bits_addend(top);
  reinterpret_cast<float*>(to.delta)[row % STEP] = -delta;
  // Without an active row, dO of the block is zero, and its byte does not matter.
  const bool usual = check_exponent(e) && (!active || (check_row(top, delta) && check_dout(byte)));
  const uint32_t flags = flags_of(usual && p.c_usual);
  if (row % 32 == 0) {
    to.factor[row / 32 % 2] = formats::decode_e8m0(byte);
    to.flags[row / 32 % 2] = flags;
  }
}

__device__ __forceinline__ void write_key(const BackwardParams& p, int64_t slot, int row) {
  KeyColumns& to = *reinterpret_cast<KeyColumns*>(p.k_columns + (2 * slot + row / STEP) * sizeof(KeyColumns));
  const float of_k = p.k_exponents[slot * TILE + row], of_v = p.v_exponents[slot * TILE + row];
  to.factors[row % STEP] = make_float2(token_scale(of_k), token_scale(of_v));
  const uint32_t flags = flags_of(check_exponent(of_k) && check_v(of_v));
  if (row % 32 == 0) {
    to.flags[row / 32 % 2] = flags;
    to.unused[row / 32 % 2] = 0;  // it is copied
  }
}

extern "C" __global__ void __launch_bounds__(PER_TILE, 1024 / PER_TILE)
    backward_operands(const __grid_constant__ BackwardParams p) {
  const uint32_t q_heads = p.kv_heads * p.group, heads = q_heads + p.kv_heads;
  const uint32_t tiles = p.status[layout::NUM_TILES], units = tiles * heads;
#pragma unroll 1
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const uint32_t index = unit % tiles, head = unit / tiles;  // in the order of memory
    const bool query = head < q_heads;
    const int64_t slot = (query ? head : head - q_heads) * p.max_tiles + index;
    const auto write_columns = [&]() {
      if (threadIdx.x >= TILE) return;
      if (query) {
        write_query(p, slot, threadIdx.x);
      } else {
        write_key(p, slot, threadIdx.x);
      }
    };
    if (!COPIED || !query) {
      write_columns();
    } else {
      const Codes codes(p.q + slot * TILE_BYTES, p.tiles[index].rows);
      write_columns();
      codes.store(p.q_wide + slot * 2 * TILE_BYTES, p.q_exponents + slot * TILE);
    }
  }
}
