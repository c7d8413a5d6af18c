// Where bytes lie: the CUDA form of flamia.reference.layout, whose notes define it.
#pragma once

#include "common/ptx.cuh"

namespace layout {

constexpr int TILE = 128;              // tokens of a tile
constexpr int BLOCK = 32;              // tokens of a token block
constexpr int BLOCKS = TILE / BLOCK;   // token blocks of a tile
constexpr int SCALE_TILE_BYTES = 512;  // 128 rows x 4 blocks

// One tile of a pack: entry of the tile table that build_schedule writes. 16 bytes, one load.
struct Tile {
  int32_t document;
  int32_t start;  // packed index of its first token
  int32_t rows;   // tokens in it, 1..128
  int32_t index;  // within its document
};
static_assert(sizeof(Tile) == 16, "a tile is one 16-byte load");

// Index of each entry of the status array that build_schedule writes.
enum Status {
  ERROR = 0,
  NUM_TILES = 1,
  NUM_FORWARD = 2,
  NUM_BACKWARD = 3,
  NUM_USED = 4,  // cu_seqlens[-1]
  LEGAL = 5,     // 1 without an error, else 0
  TICKETS = 8,   // counters of kernels whose CTAs take items one by one, two for each; 0 before and after a launch
  NUM_STATUS = 16,
};

// Offset in a payload tile with ROW_BYTES per row: Note [Payload tile].
template <int ROW_BYTES>
__device__ __forceinline__ int payload_offset(int row, int byte) {
  static_assert(ROW_BYTES > 0 && ROW_BYTES % 32 == 0, "rows are cut into panels of 128, 64 and 32 bytes");
  constexpr int WHOLE = ROW_BYTES / 128 * 128, REST = ROW_BYTES % 128;
  int start = byte & ~127, width = 128;
  if (REST != 0 && byte >= WHOLE) {
    const bool second = REST == 96 && byte >= WHOLE + 64;
    start = second ? WHOLE + 64 : WHOLE;
    width = second || REST == 32 ? 32 : 64;
  }
  const int plain = row * width + (byte - start);
  return TILE * start + (plain ^ ((plain >> 3) & (width - 16)));
}

// The same for a row length that is known only at run time.
__device__ __forceinline__ int payload_offset(int row_bytes, int row, int byte) {
  const int whole = row_bytes / 128 * 128, rest = row_bytes % 128;
  int start = byte & ~127, width = 128;
  if (byte >= whole) {
    const bool second = rest == 96 && byte >= whole + 64;
    start = second ? whole + 64 : whole;
    width = second || rest == 32 ? 32 : 64;
  }
  const int plain = row * width + (byte - start);
  return TILE * start + (plain ^ ((plain >> 3) & (width - 16)));
}

// Offset in a scale tile: Note [Scale tile].
__device__ __forceinline__ int scale_offset(int row, int block) { return (row % 32) * 16 + (row / 32) * 4 + block; }

}  // namespace layout
