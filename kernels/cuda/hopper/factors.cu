// Factor tiles of unscaled keys, whose tensors the quantizer does not see: Note [Factor tile].
#include "hopper/factors.cuh"

struct FactorsParams {
  const float* k_exponents;  // (kv_heads, max_tiles, 128)
  const float* v_exponents;
  float* factors;  // (kv_heads, max_tiles, 132)
  const layout::Tile* tiles;
  const int32_t* status;
  int64_t max_tiles;
  int32_t kv_heads;
  int32_t unused;
};
static_assert(sizeof(FactorsParams) == PARAMS_BYTES, "FactorsParams must match structs.HOPPER_FACTORS");

constexpr int THREADS = 256, WARPS = THREADS / 32;

extern "C" __global__ void __launch_bounds__(THREADS, 4) make_factors(const __grid_constant__ FactorsParams p) {
  const int lane = threadIdx.x % 32;
  const uint32_t units = uint32_t(p.status[layout::NUM_TILES]) * p.kv_heads;
  for (uint32_t unit = blockIdx.x * WARPS + threadIdx.x / 32; unit < units; unit += gridDim.x * WARPS) {
    const uint32_t index = unit / p.kv_heads;
    const int rows = p.tiles[index].rows;
    const int64_t slot = unit % p.kv_heads * p.max_tiles + index;
    float of_k[layout::BLOCKS];
    bool lost[layout::BLOCKS];
#pragma unroll
    for (int b = 0; b < layout::BLOCKS; ++b) {
      const int row = layout::BLOCK * b + lane;
      const float of_v = p.v_exponents[slot * layout::TILE + row];
      of_k[b] = p.k_exponents[slot * layout::TILE + row];
      lost[b] = row < rows && of_v != of_v;
    }
    float* const to = p.factors + slot * hopper::FACTOR_WORDS;
    hopper::write_key_factors(to, of_k, rows, false);
    hopper::write_lost_values(to, lost);
  }
}
