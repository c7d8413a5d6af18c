// What the steps of the backward need of their rows and columns: Note [Columns]. A thread for each token of a tile.
#include "hopper/backward.cuh"

using namespace backward;

// Flags of a block of 32 tokens, a warp's.
__device__ __forceinline__ uint32_t flags_of(bool usual) { return ptx::vote_any(!usual) ? SLOW : 0; }

__device__ __forceinline__ void write_query(const BackwardParams& p, int64_t slot, int row) {
  QueryColumns& to = *reinterpret_cast<QueryColumns*>(p.q_columns + (2 * slot + row / STEP) * sizeof(QueryColumns));
  const float e = p.q_exponents[slot * TILE + row], top = p.top[slot * TILE + row], delta = p.delta[slot * TILE + row];
  const uint32_t byte = p.dout_scales[slot * layout::SCALE_TILE_BYTES + layout::scale_offset(row / 32 * 32, 0)];
  const bool active = top != infinity();
  float* const score = reinterpret_cast<float*>(to.score + row % STEP / 2) + row % 2;
  score[0] = __fmul_rn(__fmul_rn(p.c, exp2_scale(e)), hopper::UNIT);
  score[2] = hopper::bits_addend(top);
  reinterpret_cast<float*>(to.delta)[row % STEP] = -delta;
  // Without an active row, dO of the block is zero, and its byte does not matter.
  const bool usual = check_exponent(e) && (!active || (check_row(top, delta) && check_dout(byte)));
  const uint32_t flags = flags_of(usual && p.fast_exponent > -infinity());
  if (row % 32 == 0) {
    to.factor[row / 32 % 2] = formats::decode_e8m0(byte);
    to.flags[row / 32 % 2] = flags;
  }
}

__device__ __forceinline__ void write_key(const BackwardParams& p, int64_t slot, int row, int rows) {
  const float e = p.k_exponents[slot * TILE + row];
#pragma unroll
  for (int diagonal = 0; diagonal < 2; ++diagonal) {
    KeyColumns& to =
        *reinterpret_cast<KeyColumns*>(p.k_columns + (4 * slot + 2 * (row / STEP) + diagonal) * sizeof(KeyColumns));
    // V1 has a scale per token, V one per block; past the document the block's stands for what is zero anyway.
    const uint8_t* const bytes = (diagonal ? p.v1_scales : p.v_scales) + slot * layout::SCALE_TILE_BYTES;
    const uint32_t byte = bytes[layout::scale_offset(diagonal ? row : row / 32 * 32, 0)];
    to.factors[row % STEP] = make_float2(exp2_scale(e), decode_scale(byte));
    const uint32_t flags = flags_of(check_exponent(e) && (check_v(byte) || row >= rows));
    if (row % 32 == 0) {
      to.flags[row / 32 % 2] = flags;
      to.unused[row / 32 % 2] = 0;  // it is copied
    }
  }
}

extern "C" __global__ void __launch_bounds__(128, 8) backward_columns(const __grid_constant__ BackwardParams p) {
  const uint32_t q_heads = p.kv_heads * p.group, heads = q_heads + p.kv_heads;
  const uint32_t units = uint32_t(p.status[layout::NUM_TILES]) * heads;
#pragma unroll 1
  for (uint32_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const uint32_t index = unit / heads, head = unit % heads;
    if (head < q_heads) {
      write_query(p, head * p.max_tiles + index, threadIdx.x);
    } else {
      write_key(p, (head - q_heads) * p.max_tiles + index, threadIdx.x, p.tiles[index].rows);
    }
  }
}
