// Tiles in shared memory as wgmma reads them, and pipelines of bulk copies.
//
// Note [Wide tile]
// ~~~~~~~~~~~~~~~~
// A *wide tile* is a payload tile of two-byte elements: 128 tokens, rows of 2 D bytes, in the order of Note [Payload
// tile] of flamia.reference.layout. Its panels hold 64 channels each, 128 rows of 128 bytes, 16 KB. wgmma reads it
// K-major (contraction over channels) and MN-major (over tokens), as it reads no one-byte tile.
#pragma once

#include "common/layout.cuh"
#include "hopper/ptx.cuh"

namespace hopper {

constexpr int PANEL_BYTES = 128 * layout::TILE;  // of 128 bytes per row

// ---- descriptors -----------------------------------------------------------------------------------------------

// A shared-memory matrix descriptor: start address, the two byte offsets, swizzle of rows of WIDTH bytes.
template <int WIDTH>
__device__ __forceinline__ uint64_t make_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  static_assert(WIDTH == 128 || WIDTH == 64, "rows are swizzled over 128 or 64 bytes");
  constexpr uint64_t SWIZZLE = WIDTH == 128 ? 1 : 2;
  const uint32_t low = (address >> 4 & 0x3FFF) | (leading >> 4 & 0x3FFF) << 16;
  return low | uint64_t(stride >> 4 & 0x3FFF) << 32 | SWIZZLE << 62;
}

// Rows of WIDTH <= 128 bytes, contracted along the bytes. `advance` by byte / 16 to start at another byte of the rows.
template <int WIDTH>
__device__ __forceinline__ uint64_t describe_k_major(uint32_t address) {
  return make_descriptor<WIDTH>(address, 16, 8 * WIDTH);
}

// Panels of 64 channels, `panel` bytes apart, contracted along the 128 rows. `advance` by MN_STEP for the next 16 rows.
__device__ __forceinline__ uint64_t describe_mn_major(uint32_t address, uint32_t panel) {
  return make_descriptor<128>(address, panel, 1024);
}
constexpr uint32_t MN_STEP = 16 * 128 >> 4;

// A descriptor whose start lies 16 * `pieces` bytes further: shared memory is too small for a carry.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t pieces) {
  return (descriptor & 0xFFFFFFFF00000000u) | (uint32_t(descriptor) + pieces);
}

// ---- barriers --------------------------------------------------------------------------------------------------

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// Position in a ring of STAGES buffers; `phase` is the parity of the round.
template <int STAGES>
struct Ring {
  uint32_t stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace hopper
