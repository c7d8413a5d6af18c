// What is where in a Blackwell forward CTA: sizes, tensor memory, shared memory, barriers; and the descriptors by which
// the tensor core finds operands. Everything that a static assert can hold is held here.
#pragma once

#include "blackwell/ptx.cuh"
#include "common/layout.cuh"

namespace blackwell {

#if defined(RECIPE_IS_MXFP8)
constexpr bool NVFP4 = false;
#elif defined(RECIPE_IS_NVFP4_FP8)
constexpr bool NVFP4 = true;
#endif

constexpr int D = HEAD_DIM;
static_assert(D == 64 || D == 128, "the Blackwell kernels take head_dim 64 and 128");

// Wait where PTX promises no order: Note [P under the next scores] of multiply.cuh.
constexpr bool WAIT_ALWAYS = STRICT != 0;
// Whether P and m of every tile leave for global memory, for tests.
constexpr bool STAGE_HOOKS = HOOKS != 0;

// ---- tiles -----------------------------------------------------------------------------------------------------

constexpr int STEP_BYTES = 32;                                 // of each row, contracted by one instruction
constexpr int SCORE_ROW = NVFP4 ? D / 2 : D;                   // bytes of a row of Q and K
constexpr int SCORE_TILE = layout::TILE * SCORE_ROW;
constexpr int SCORE_STEPS = SCORE_ROW / STEP_BYTES;
constexpr int SCORE_SCALE_TILES = NVFP4 ? D / 64 : 1;
constexpr int SCORE_SCALES = SCORE_SCALE_TILES * layout::SCALE_TILE_BYTES;
constexpr int VALUE_TILE = layout::TILE * D;
constexpr int VALUE_STEPS = layout::TILE / STEP_BYTES;         // a step contracts 32 tokens
constexpr int SCALES = layout::SCALE_TILE_BYTES;
constexpr int QUERY_TILES = 2;                                 // of a work item
constexpr int K_STAGES = 3;
constexpr int V_STAGES = 3;

// ---- roles -----------------------------------------------------------------------------------------------------

// Warps 0-3 and 4-7: softmax of query tile 0 and 1; 8-11: epilogue; 12: load; 13: multiply; 14 and 15 only fill the
// warpgroup, whose registers are given away together.
constexpr int WARPS = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int EPILOGUE_WARP = 8, LOAD_WARP = 12, MULTIPLY_WARP = 13;
constexpr int LAUNCH_REGISTERS = 128, SOFTMAX_REGISTERS = 192, EPILOGUE_REGISTERS = 72, OTHER_REGISTERS = 48;
static_assert(THREADS * LAUNCH_REGISTERS <= 65536, "a launch of all threads must fit the 65536 registers of an SM");
static_assert(256 * SOFTMAX_REGISTERS + 128 * EPILOGUE_REGISTERS + 128 * OTHER_REGISTERS <= THREADS * LAUNCH_REGISTERS,
              "what the roles take by setmaxnreg must not exceed what the launch gave");
static_assert(SOFTMAX_REGISTERS % 8 == 0 && EPILOGUE_REGISTERS % 8 == 0 && OTHER_REGISTERS % 8 == 0,
              "setmaxnreg takes multiples of 8");

// ---- tensor memory ---------------------------------------------------------------------------------------------
//
// Note [Tensor memory map]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// With head_dim 128 two S and two O fill all 512 columns, so everything else lives inside S, in columns whose scores
// are in registers by then. Query tile i owns the columns
//
//   S_i   128 i ..            128  scores; then, from its first column:
//           0 ..  31               P, four E4M3 codes to a word
//          32 ..  47               l, an accumulator of N = 16 columns of which only one is used (head_dim 128)
//          48 ..  51               the constant scale 2^0, of the ones and of V1
//          52 ..  55               scales of P                       (the row's, the same for its four blocks)
//          56 ..  59               scales of V32
//          64 ..  79               scales of Q (up to 8) and of K (up to 8) for the scores of the *other* query tile
//          80 .. 111               P' of the diagonal tile
//         112 .. 115               scales of P'
//   O_i   256 + D i ..         D  output
//   l_i   256 + 2 D + 16 i ..  16  the same l, with head_dim 64, where there is room
//
// The scores of tile i need their scales while S_i is written, so those are parked in S_{1-i}, whose scores must have
// been read. With head_dim 128 l waits in a register while S_i is written: Note [Row sum].
constexpr uint32_t COLUMNS = 512;
constexpr uint32_t S_COLUMNS = layout::TILE;
constexpr uint32_t P_COLUMN = 0, P_COLUMNS = layout::TILE / 4;
constexpr uint32_t L_COLUMNS = 16, L_IN_S = 32;  // PTX takes N = 8 too, CUTLASS only multiples of 16 with M = 128
constexpr uint32_t ONE_SCALE_COLUMN = 48, P_SCALE_COLUMN = 52, V_SCALE_COLUMN = 56;
constexpr uint32_t Q_SCALE_COLUMN = 64, K_SCALE_COLUMN = Q_SCALE_COLUMN + 4 * SCORE_SCALE_TILES;
constexpr uint32_t FOLDED_COLUMN = 80, FOLDED_SCALE_COLUMN = FOLDED_COLUMN + P_COLUMNS;
constexpr uint32_t O_COLUMN = QUERY_TILES * S_COLUMNS;
constexpr uint32_t L_RESIDENT_COLUMN = O_COLUMN + QUERY_TILES * D;
// Whether l has columns of its own.
constexpr bool L_RESIDENT = L_RESIDENT_COLUMN + QUERY_TILES * L_COLUMNS <= COLUMNS;
static_assert(O_COLUMN + QUERY_TILES * D <= COLUMNS, "S and O of both query tiles must fit the 512 columns");
static_assert(P_COLUMN + P_COLUMNS <= L_IN_S && L_IN_S + L_COLUMNS == ONE_SCALE_COLUMN,
              "P and l must not overlap, and l and the constant scales leave in one store of 8 columns");
static_assert(ONE_SCALE_COLUMN + 4 <= P_SCALE_COLUMN && P_SCALE_COLUMN + 4 <= V_SCALE_COLUMN &&
                  V_SCALE_COLUMN + 4 <= Q_SCALE_COLUMN,
              "scale tables are 4 columns each");
static_assert(K_SCALE_COLUMN + 4 * SCORE_SCALE_TILES <= FOLDED_COLUMN && FOLDED_SCALE_COLUMN + 4 <= S_COLUMNS,
              "what is parked in S must fit its 128 columns");

// First column of query tile i's l, from the base of tensor memory; one of the last four is used.
__device__ __forceinline__ uint32_t l_column(int i) {
  return L_RESIDENT ? L_RESIDENT_COLUMN + i * L_COLUMNS : i * S_COLUMNS + L_IN_S;
}
constexpr uint32_t L_USED = L_COLUMNS - 4;

// Lane 32 w of a column, where warp w of a warpgroup reaches tensor memory.
__device__ __forceinline__ uint32_t lanes_of_warp(int w) { return uint32_t(w) << 21; }

// ---- work ------------------------------------------------------------------------------------------------------

// One work item, as the load warp publishes it: one or two adjacent query tiles of a head.
struct alignas(16) Work {
  int32_t tiles;       // query tiles; 0: no more work
  int32_t head;        // query head
  int32_t tile;        // first query tile, in the tile table
  int32_t query_slot;  // the same in payloads: counted over heads
  int32_t key_slot;    // of the document's first key tile
  int32_t keys[QUERY_TILES];  // key tiles that each query tile sees; keys[1] is 0 or at least keys[0]
  int32_t last_rows;   // tokens in the document's last tile
};
static_assert(sizeof(Work) == 32, "two 16-byte loads");

// What softmax leaves for the epilogue, per row.
struct RowStatistics {
  float sum;    // l in the units of O
  float saved;  // l in units of 2^m
  float top;    // m
};

// ---- shared memory ---------------------------------------------------------------------------------------------

constexpr int WORK_STAGES = 2;
constexpr int STAGING_ROW = 2 * D;           // bytes of an output row that leave together
constexpr int STAGING_PITCH = STAGING_ROW + 16;  // rows start in different banks

struct alignas(1024) Shared {
  uint8_t q[QUERY_TILES][SCORE_TILE];
  uint8_t k[K_STAGES][SCORE_TILE];
  uint8_t v[V_STAGES][VALUE_TILE];
  uint8_t ones[L_COLUMNS * layout::TILE];  // rows of 128 tokens of 1.0
  alignas(128) uint8_t q_scales[QUERY_TILES][SCORE_SCALES];
  uint8_t k_scales[K_STAGES][SCORE_SCALES];
  uint8_t v_scales[V_STAGES][SCALES];
  uint8_t fold[QUERY_TILES][SCALES];      // scales of V1 in the diagonal tile, contraction over channels
  uint8_t p_scales[QUERY_TILES][SCALES];
  uint8_t folded_scales[QUERY_TILES][SCALES];
  uint8_t staging[layout::TILE][STAGING_PITCH];
  RowStatistics rows[QUERY_TILES][layout::TILE];
  Work work[WORK_STAGES];
  // Barriers: Note [Barriers] of forward.cu.
  uint64_t work_full[WORK_STAGES], work_empty[WORK_STAGES];
  uint64_t q_full[QUERY_TILES], q_empty[QUERY_TILES];
  uint64_t k_full[K_STAGES], k_empty[K_STAGES];
  uint64_t v_full[V_STAGES], v_empty[V_STAGES];
  uint64_t s_full[QUERY_TILES], s_read[QUERY_TILES];
  uint64_t p_ready[QUERY_TILES], pv_done[QUERY_TILES], l_read[QUERY_TILES];
  uint64_t rows_final[QUERY_TILES], o_free[QUERY_TILES];
  uint32_t tensor_memory;
};
static_assert(sizeof(Shared) <= 227 * 1024, "a CTA has 227 KB of shared memory");

// ---- descriptors -----------------------------------------------------------------------------------------------

constexpr uint64_t DESCRIPTOR_VERSION = 1ull << 46;

// Operand tiles with rows of WIDTH bytes, swizzled over WIDTH bytes: Note [Payload tile] of flamia.reference.layout.
// The same for both majors: groups of 8 rows follow each other. Advance by STEP >> 4: 32 bytes of each row K-major, 32
// rows MN-major.
template <int WIDTH>
__device__ __forceinline__ uint64_t describe_operand(uint32_t address) {
  static_assert(WIDTH == 128 || WIDTH == 64 || WIDTH == 32, "rows are swizzled over 128, 64 or 32 bytes");
  constexpr uint64_t SWIZZLE = WIDTH == 128 ? 2 : WIDTH == 64 ? 4 : 6;
  return (address & 0x3FFFF) >> 4 | uint64_t(8 * WIDTH >> 4) << 32 | DESCRIPTOR_VERSION | SWIZZLE << 61;
}

// A scale tile: 32 lines of 16 bytes, groups of 8 lines 128 bytes apart.
__device__ __forceinline__ uint64_t describe_scales(uint32_t address) {
  return (address & 0x3FFFF) >> 4 | uint64_t(128 >> 4) << 32 | DESCRIPTOR_VERSION;
}

// Instruction descriptors. E4M3 under E8M0: types 0, scale type 1. E2M1 under UE4M3: types 1, scale type 0.
__device__ constexpr uint32_t shape(uint32_t n) { return n >> 3 << 17 | 128u >> 4 << 24; }
constexpr uint32_t E8M0_SCALES = 1u << 23, B_MN_MAJOR = 1u << 16, E2M1_TYPES = 1u << 7 | 1u << 10;
constexpr uint32_t SCORE_INSTRUCTION = shape(layout::TILE) | (NVFP4 ? E2M1_TYPES : E8M0_SCALES);
constexpr uint32_t VALUE_INSTRUCTION = shape(D) | E8M0_SCALES | B_MN_MAJOR;
constexpr uint32_t SUM_INSTRUCTION = shape(L_COLUMNS) | E8M0_SCALES;
// Which byte of the scale words a step takes, for A and B.
__device__ __forceinline__ uint32_t scale_ids(uint32_t step) { return step << 29 | step << 4; }

}  // namespace blackwell
