// What is where in a CTA of the Blackwell backward: roles, tensor memory, shared memory, work. Everything that a static
// assert can hold is held here.
//
// Note [Two owners]
// ~~~~~~~~~~~~~~~~~
// One source, two kernels. OWNER keys: a CTA owns 128 keys of a KV head and walks, for each query head of the group,
// the query tiles that see them, ascending: dV += P^T dO', dK += X^T Q. OWNER queries: a CTA owns 128 queries and walks
// the key tiles that they see, ascending: dQ += X K. Rows of a tile are the owner's tokens, columns those of the tile
// that streams by; S, dP, P and X of both kernels are transposes of each other and equal bit for bit, so nothing but
// the price of computing S and dP twice follows from the split, and no result waits for another CTA.
#pragma once

#include "blackwell/layout.cuh"
#include "blackwell/pipeline.cuh"

namespace blackwell::backward {

#if defined(OWNER_IS_KEYS)
constexpr bool KEYS = true;
#elif defined(OWNER_IS_QUERIES)
constexpr bool KEYS = false;
#endif

constexpr int TILE = layout::TILE;

// ---- roles -----------------------------------------------------------------------------------------------------

// Warps 0-3 and 4-7: numbers of the left and the right half of a tile's columns, and the gradients' way out; 8: load;
// 9: multiply; 10 and 11: what belongs to columns.
constexpr int THREADS = 384;
constexpr int COMPUTE_WARPS = 8, LOAD_WARP = 8, MULTIPLY_WARP = 9, COLUMN_WARP = 10, COLUMN_WARPS = 2;
constexpr int LAUNCH_REGISTERS = 168, COMPUTE_REGISTERS = 208, OTHER_REGISTERS = 88;
static_assert(THREADS * LAUNCH_REGISTERS <= 65536, "a launch of all threads must fit the 65536 registers of an SM");
static_assert(256 * COMPUTE_REGISTERS + 128 * OTHER_REGISTERS <= THREADS * LAUNCH_REGISTERS,
              "what the roles take by setmaxnreg must not exceed what the launch gave");
static_assert(COMPUTE_REGISTERS % 8 == 0 && OTHER_REGISTERS % 8 == 0, "setmaxnreg takes multiples of 8");

// ---- tensor memory ---------------------------------------------------------------------------------------------
//
// Note [Backward tensor memory]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// With head_dim 128 the owner of keys fills all 512 columns, so scales are parked where numbers have been read:
//
//   S   0 ..   128  scores. Once read, in each half h = 0, 1 from column 64 h on:
//         64 h ..     16  P of the half's two blocks, 8 words each
//         32 ..        8  scales of V and dO' for dP; the owner of queries: of dO' and V
//         40 ..        8  scales of P and of dO' for dV
//   G   128 .. 128  dP. Once read:
//         64 h ..     16  X, likewise
//         32 ..       16  scales of both operands of the next S (up to 8 each)
//         48 ..        8  scales of X, and 2^0, for dK or dQ
//   256 ..       D  dV, or dQ
//   256 + D ..   D  dK
constexpr uint32_t COLUMNS = 512;
constexpr uint32_t S_COLUMN = 0, G_COLUMN = 128, FIRST_COLUMN = 256, SECOND_COLUMN = FIRST_COLUMN + D;
constexpr uint32_t HALF = 64, BLOCK_WORDS = layout::BLOCK / 4;
constexpr uint32_t GRADIENT_SCALES = S_COLUMN + 32, VALUE_SCALES = S_COLUMN + 40;
constexpr uint32_t SCORE_SCALES_A = G_COLUMN + 32, SCORE_SCALES_B = SCORE_SCALES_A + 4 * SCORE_SCALE_TILES;
constexpr uint32_t X_SCALES = G_COLUMN + 48;
static_assert(SECOND_COLUMN + D <= COLUMNS, "S, dP, dV and dK must fit the 512 columns");
static_assert(S_COLUMN + 2 * BLOCK_WORDS <= GRADIENT_SCALES && GRADIENT_SCALES + 8 <= VALUE_SCALES &&
                  VALUE_SCALES + 8 <= S_COLUMN + HALF,
              "P and the scales parked in S must not overlap");
static_assert(G_COLUMN + 2 * BLOCK_WORDS <= SCORE_SCALES_A && SCORE_SCALES_B + 4 * SCORE_SCALE_TILES <= X_SCALES && X_SCALES + 8 <= G_COLUMN + HALF,
              "X and the scales parked in dP must not overlap");

// ---- work ------------------------------------------------------------------------------------------------------

// One work item, as the load warp publishes it: the owner's tile, and the tiles that stream by for each head.
struct alignas(16) Work {
  int32_t tiles;     // that stream by, for each head; 0: no more work
  int32_t head;      // of the gradient
  int32_t slot;      // the owner's tile in its payload: counted over heads
  int32_t stream;    // the first tile that streams by, likewise, of the first head
  int32_t tile;      // the owner's, in the tile table
  int32_t rows;      // tokens in the owner's tile
  int32_t columns;   // tokens in the last tile that streams by
  int32_t diagonal;  // which of the tiles that stream by is the owner's own; -1 if that has no meaning
  int32_t base;      // the document's first tile, in the tile table
  int32_t count;     // the document's tiles
  int64_t pair;      // the number of its first pair of tiles
};
static_assert(sizeof(Work) == 48, "three 16-byte loads");

// What belongs to the columns of a tile, ready for pairs of columns.
struct alignas(16) Columns {
  float power[TILE];  // 2^eQ; owner of queries, for whom this is all: 2^eK
  float minus[TILE];  // -delta 2^eQ
  float shift[TILE];  // MAGIC + 8 - m
  float below[TILE];  // MAGIC + 7 - m
  float delta[TILE];
  float top[TILE];  // m, +inf, NaN
  struct alignas(16) Summary {
    uint32_t unusual[COLUMN_WARPS];  // whether one of them is outside Note [Fast tiles] of backward_numbers.cuh
    float reach[COLUMN_WARPS];       // the largest |m|
  } summary;
};

// ---- shared memory ---------------------------------------------------------------------------------------------

constexpr int FIXED_STAGES = 2, STREAM_STAGES = 2, WORK_STAGES = 2, COLUMN_STAGES = 2;
constexpr bool TOKEN_COPY = NVFP4;  // whether the scores read another copy than dK and dQ

// The owner's operands of S and dP.
struct alignas(1024) Fixed {
  uint8_t score[SCORE_TILE];
  uint8_t gradient[KEYS ? 2 : 1][VALUE_TILE];  // V and V1, or dO'
  uint8_t score_scales[SCORE_SCALES];
  uint8_t gradient_scales[KEYS ? 2 : 1][SCALES];
};

// What streams by for S, and for dK or dQ: the same bytes but for NVFP4.
constexpr int TOKENS_AT = TOKEN_COPY ? SCORE_TILE : 0;
struct alignas(1024) ScoreStage {
  uint8_t payload[TOKEN_COPY ? SCORE_TILE + VALUE_TILE : SCORE_TILE];
  uint8_t scales[SCORE_SCALES];
};
static_assert(TOKEN_COPY || SCORE_TILE == VALUE_TILE, "one copy serves both contractions");

// What streams by for dP and for dV.
struct alignas(1024) GradientStage {
  uint8_t payload[VALUE_TILE];
  uint8_t scales[SCALES];
  uint8_t token_scales[SCALES];
};
static_assert(SCORE_TILE % 1024 == 0 && VALUE_TILE % 1024 == 0, "operand tiles start at multiples of 1024 bytes");

struct alignas(1024) Shared {
  Fixed fixed[FIXED_STAGES];
  ScoreStage scores[STREAM_STAGES];
  GradientStage gradients[STREAM_STAGES];
  alignas(128) uint8_t one_scales[SCALES];
  uint8_t p_scales[SCALES];
  uint8_t x_scales[SCALES];
  Columns columns[COLUMN_STAGES];
  Work work[WORK_STAGES];
  // Barriers: Note [Backward barriers] of backward.cu.
  uint64_t work_full[WORK_STAGES], work_empty[WORK_STAGES];
  uint64_t fixed_full[FIXED_STAGES], fixed_empty[FIXED_STAGES];
  uint64_t score_full[STREAM_STAGES], score_empty[STREAM_STAGES];
  uint64_t gradient_full[STREAM_STAGES], gradient_empty[STREAM_STAGES];
  uint64_t columns_full[COLUMN_STAGES], columns_empty[COLUMN_STAGES];
  uint64_t s_full, s_read, g_full, g_read, p_ready, x_ready, sums_full, settled;
  uint32_t tensor_memory;
};
static_assert(sizeof(Shared) <= 227 * 1024, "a CTA has 227 KB of shared memory");

// Of dP: 128 columns of E4M3 products.
constexpr uint32_t GRADIENT_INSTRUCTION = shape(TILE) | E8M0_SCALES;

}  // namespace blackwell::backward
