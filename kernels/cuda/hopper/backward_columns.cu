// What the steps of the backward need of their columns: Note [Columns]. A thread for each token of a tile.
#include "hopper/backward.cuh"

using namespace backward;

// Four numbers of each pair of columns: put two of them.
__device__ __forceinline__ void put(float4* pairs, int column, float first, float second) {
  float* const to = reinterpret_cast<float*>(pairs + column / 2) + column % 2;
  to[0] = first;
  to[2] = second;
}

__device__ __forceinline__ void summarize(Summary& to, int block, bool usual, bool tiny, float exponent, float factor) {
  const uint32_t flags = (ptx::vote_any(!usual) ? SLOW : 0) | (ptx::vote_any(tiny) ? TINY : 0);
  const uint32_t largest = ptx::redux_max_u32(uint32_t(int(fmaxf(exponent, -127.0f)) + 127));
  if (threadIdx.x % 32 == 0) {
    to.flags[block] = flags;
    to.largest[block] = float(int(largest) - 127);
    to.factor[block] = factor;
    to.unused[block] = 0.0f;
  }
}

__device__ __forceinline__ void write_query(const BackwardParams& p, int64_t slot, int row) {
  QueryColumns& to = *reinterpret_cast<QueryColumns*>(p.q_columns + (2 * slot + row / STEP) * sizeof(QueryColumns));
  const float e = p.q_exponents[slot * TILE + row], top = p.top[slot * TILE + row];
  const uint32_t byte = p.dout_scales[slot * layout::SCALE_TILE_BYTES + layout::scale_offset(row / 32 * 32, 0)];
  const float of_query = exp2_scale(e);
  put(to.score, row % STEP, __fsub_rn(EXPONENT_ORIGIN, top), __fmul_rn(p.c, of_query));
  put(to.gradient, row % STEP, -p.delta[slot * TILE + row], __fmul_rn(p.softmax_scale, of_query));
  const bool usual = check_exponent(e) && check_top(top) && check_dout(byte);
  summarize(to.summary, row / 32 % 2, usual, byte == 0 && top != infinity(), e, formats::decode_e8m0(byte));
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
    put(to.score, row % STEP, exp2_scale(e), decode_scale(byte));
    summarize(to.summary, row / 32 % 2, check_exponent(e) && check_v(byte), byte == 0 && row < rows, e, decode_scale(byte));
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
