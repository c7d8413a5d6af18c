// The Hopper forward: its parameters, its constants, and what lies in shared memory.
#pragma once

#include "common/tokens.cuh"
#include "hopper/softmax.cuh"
#include "hopper/tiles.cuh"

struct ForwardParams {
  const uint8_t* q;          // (Hq, max_tiles, 128 ROW_BYTES)
  const float* q_exponents;  // (Hq, max_tiles, 128), NaN for a lost token; of unscaled rows a bound
  const uint8_t* k;          // (Hkv, max_tiles, 128 ROW_BYTES)
  const float* factors;      // (Hkv, max_tiles, 132)
  const uint8_t* v;          // (Hkv, max_tiles, 256 D), wide
  Tokens out;                // strides in elements; of two-byte elements multiples of 16 bytes, as the address
  float* lse;                // (Hq, num_tokens)
  float* m;
  float* l;
  const layout::Tile* tiles;
  const int32_t* tile_offsets;
  const int4* items;
  const int32_t* status;
  int32_t* ticket;  // the next item, and how many CTAs have found none; both 0 before and after a launch
  int64_t max_tiles;
  int64_t num_tokens;
  float c;
  int32_t c_exponent;  // c < 2^c_exponent
  int32_t c_usual;     // c is at least 2^-40
  int32_t group;
  int32_t causal;
  int32_t element_bytes;  // of out: 2 or 4
  int32_t half;           // out is float16
  int32_t q_heads;
};
static_assert(sizeof(ForwardParams) == PARAMS_BYTES, "ForwardParams must match structs.HOPPER_FORWARD");

#if defined(RECIPE_IS_MXFP8)
constexpr bool E4M3 = true;
#elif defined(RECIPE_IS_BF16)
constexpr bool E4M3 = false;
#endif

constexpr int FRACTION_BITS = E4M3 ? 3 : 7;  // of P

constexpr int D = HEAD_DIM;
static_assert(D == 64 || D == 128, "the Hopper kernels take head_dim 64 and 128");
constexpr int ROW_BYTES = E4M3 ? D : 2 * D;
constexpr int WIDTH = ROW_BYTES < 128 ? ROW_BYTES : 128;  // of a row in a panel of Q or K
constexpr int TILE_BYTES = layout::TILE * ROW_BYTES;      // of Q and K
constexpr int PANELS = D / 64;                        // of a wide tile
constexpr int WIDE_BYTES = PANELS * hopper::PANEL_BYTES;
constexpr int O_REGISTERS = D / 2 + 4;  // and those of l

// |acc| < 2^this times 2^eQ 2^eK: 128 products of at most 448^2, or, unscaled, of less than 1.
constexpr int MAX_SCORE_EXPONENT = E4M3 ? 25 : 7;

constexpr int GROUPS = 2;  // consumer warpgroups
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int WORK_STAGES = 2;  // query tiles
constexpr int KV_STAGES = ROW_BYTES == 256 ? 2 : 3;

// ---- shared memory ---------------------------------------------------------------------------------------------
//
// Note [Slots]
// ~~~~~~~~~~~~
// Shared memory is cut into slots of 16 KB, one panel of a wide tile each, counted downward from the panel of ones,
// slot 0. wgmma finds the panels of V at equal distances, so that with a distance of L slots, other for each stage, V
// lies in slots 2 L and L (one panel: L) and the ones, for all stages, in slot 0. K and Q take what is left.
constexpr int V_DISTANCE[3] = {1, KV_STAGES == 3 && D == 64 ? 2 : 3, D == 64 ? 3 : 4};
// Of two panels, that with the lower address. K's slots are equally far apart.
constexpr int K_SLOT = D == 64 ? 4 : 5, K_SLOT_STEP = D == 64 ? 1 : KV_STAGES == 3 ? 2 : 3;
constexpr int Q_SLOT[2] = {D == 64 ? 7 : 10, D == 64 ? 8 : KV_STAGES == 3 ? 11 : 12};
constexpr int SLOTS = Q_SLOT[1] + 1;

// Note [Two heads]
// ~~~~~~~~~~~~~~~~
// A query tile of at most 64 rows is work for one warpgroup. It is done for two heads at once, an even one by warpgroup
// 0 and the next one by warpgroup 1, which sees its rows as rows 64 to 127. Their key tiles come in turns, and of those
// of the other head a warpgroup waits for none and gives none back: the owner does that for both. It takes no round of
// a barrier for another, as by Note [Turns] the tile that was there before has been waited for by its owner.

// What a warpgroup needs to know of a query tile.
struct alignas(16) Work {
  int32_t keys;  // key tiles; 0: no more work
  int32_t head;
  int32_t tile;  // in the tile table
  int32_t start, rows;  // its tokens
  int32_t slow;   // Note [Usual and unusual exponents]
  int32_t lost;   // all rows see a lost token of K (bit 0), of V (bit 1)
  int32_t first_lost_k, first_lost_v;  // in the diagonal tile, as rows
  int32_t first_key;  // its slot in the KV head's tiles, counted over all heads
  int32_t heads;      // 2: Note [Two heads]
  int32_t shift;      // where the rows begin: 64 in the second of two heads
};

// Barriers: where those of each kind begin, one for each stage.
enum Barrier {
  WORK_FULL = 0,
  WORK_EMPTY = WORK_FULL + WORK_STAGES,
  Q_FULL = WORK_EMPTY + WORK_STAGES,
  Q_EMPTY = Q_FULL + WORK_STAGES,
  SUMS_FULL = Q_EMPTY + WORK_STAGES,
  K_FULL = SUMS_FULL + WORK_STAGES,
  K_EMPTY = K_FULL + KV_STAGES,
  V_FULL = K_EMPTY + KV_STAGES,
  V_EMPTY = V_FULL + KV_STAGES,
  BARRIERS = V_EMPTY + KV_STAGES
};

struct alignas(1024) Shared {
  uint8_t slots[SLOTS][hopper::PANEL_BYTES];
  uint64_t barriers[BARRIERS];
  float factors[KV_STAGES][hopper::FACTOR_WORDS];
  float q_exponents[WORK_STAGES][layout::TILE];
  float2 sums[WORK_STAGES][layout::TILE];  // M and l of each row; l is NaN in a lost one
  Work work[WORK_STAGES][GROUPS];
  Work found[GROUPS];  // of the next query tile
};
extern "C" __constant__ const int attention_forward_shared_bytes = sizeof(Shared);
static_assert(sizeof(Shared) <= 227 * 1024, "a CTA has 227 KB of shared memory");

// Address of a barrier, given that of Shared.
__device__ __forceinline__ uint32_t barrier(uint32_t shared, Barrier kind, uint32_t stage) {
  return shared + SLOTS * hopper::PANEL_BYTES + 8 * (kind + stage);
}
__device__ __forceinline__ uint8_t* slot(Shared& shared, int i) { return shared.slots[SLOTS - 1 - i]; }
// `values[stage]` of a table, without memory.
__device__ __forceinline__ int pick(const int (&values)[3], uint32_t stage) {
  return stage == 0 ? values[0] : stage == 1 ? values[1] : values[2];
}

using KvRing = hopper::Ring<KV_STAGES>;
// None, one or two tiles further.
__device__ __forceinline__ void advance(KvRing& ring, uint32_t tiles) {
  ring.stage += tiles;
  if (ring.stage >= KV_STAGES) ring.stage -= KV_STAGES, ring.phase ^= 1;
}
using WorkRing = hopper::Ring<WORK_STAGES>;
