// Tiles of X on their way from `backward_keys` to `backward_dq`.
//
// Note [Packed X]
// ~~~~~~~~~~~~~~~
// A *piece* is what a warp of `backward_keys` has of X^T: 16 keys and 64 queries, four A operands, each of four 8x8
// matrices of bfloat16 numbers. Rounded to the significand of E4M3, a number leaves its four lowest bits unused, so three
// matrices hold the fourth, one of whose numbers lies where four bits of it are: bits 4 to 7 in the first matrix, 8 to 11
// in the second, 12 to 15 in the third. A piece is 12 matrices, operand after operand, each of 8 rows (keys) of 16 bytes
// (queries). Nothing is lost but which NaN a NaN is, and X takes three quarters of the memory.
//
// `ldmatrix.trans` turns a matrix with what is in its low bits, and gives `backward_dq` an A operand of queries and keys,
// in which the second and the third matrix have changed places.
//
// With the significand of bfloat16 no bit is unused. There, a piece is a row of 128 bytes for each key, 64 queries, in the
// 128-byte swizzle: 16-byte chunk c of row r at 128 r + 16 (c ^ r % 8). So 64 keys are an MN-major A operand as they lie.
#pragma once

#include "hopper/backward.cuh"

namespace backward {

constexpr bool PACKED = F == 3;
constexpr int MATRIX_BYTES = 8 * 16;
constexpr int OPERAND_BYTES = (PACKED ? 3 : 4) * MATRIX_BYTES;  // 16 keys, 16 queries
constexpr int PIECE_BYTES = STEP / 16 * OPERAND_BYTES;          // 16 keys, 64 queries
constexpr int BLOCK_BYTES = STEP / 16 * PIECE_BYTES;            // 64 keys, 64 queries
constexpr int HALF_BYTES = TILE / STEP * BLOCK_BYTES;           // 128 keys, 64 queries
constexpr int64_t PAIR_BYTES = 2 * HALF_BYTES;

constexpr uint32_t UNUSED = 0x000F000Fu;  // bits of a pair of numbers

// Where a lane stores rows of matrices, or of swizzled chunks, in a piece that begins at `piece`.
__device__ __forceinline__ uint32_t stored_place(uint32_t piece, uint32_t lane) {
  return piece + (PACKED ? 16 * lane : 128 * (lane % 16) + 16 * (lane / 16 ^ lane % 8));
}

// A warp's X^T to a piece in shared memory.
__device__ __forceinline__ void store_x(uint32_t place, const uint32_t (&x)[16]) {
  if constexpr (PACKED) {
    uint32_t packed[12];
#pragma unroll
    for (int i = 0; i < 12; ++i) {
      const uint32_t fourth = x[i / 3 * 4 + 3] >> 4 * (i % 3 + 1);
      packed[i] = x[i / 3 * 4 + i % 3] & ~UNUSED | fourth & UNUSED;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) ptx::stmatrix_x4(place + 4 * MATRIX_BYTES * i, packed + 4 * i);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::stmatrix_x4(place ^ 32 * i, x + 4 * i);
  }
}

// Where a lane finds rows of the matrices of 16 queries and 32 keys, of which two pieces begin at `block`; the last two
// matrices in lanes 0 to 15.
struct PackedPlaces {
  uint32_t place[2];
  __device__ __forceinline__ PackedPlaces(uint32_t block, int queries) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t matrix = i == 0 ? lane / 8 : 4 + lane / 8 % 2;
      place[i] = block + matrix / 3 * PIECE_BYTES + queries * OPERAND_BYTES + matrix % 3 * MATRIX_BYTES + lane % 8 * 16;
    }
  }
};

// X of 16 queries and 32 keys, `distance` bytes further: two A operands.
__device__ __forceinline__ void load_packed(uint32_t (&x)[8], const PackedPlaces& from, uint32_t distance) {
  uint32_t packed[6];
  ptx::ldmatrix_x4_trans(packed, from.place[0] + distance);
  ptx::ldmatrix_x2_trans(packed + 4, from.place[1] + distance);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t first = packed[3 * i], second = packed[3 * i + 1], third = packed[3 * i + 2];
    x[4 * i] = first & ~UNUSED;
    x[4 * i + 1] = third & ~UNUSED;
    x[4 * i + 2] = second & ~UNUSED;
    x[4 * i + 3] = first << 4 & UNUSED << 4 | second << 8 & UNUSED << 8 | third << 12 & UNUSED << 12;
  }
}

}  // namespace backward
