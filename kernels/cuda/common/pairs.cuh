// Numbers of the pairs of a query tile and a key tile that meet: where a tile that one kernel of a backward stores for
// another lies.
#pragma once

#include "common/ptx.cuh"

namespace layout {

// The number of query tile i and key tile j of a document, within a query head. The document's first tile is `base` of
// the pack, and it has `count`. Documents do not overlap: sums of squares, and of triangles, are below the square, or the
// triangle, of the sum; so the pairs of a pack number at most max_tiles^2, or max_tiles (max_tiles + 1) / 2 if causal.
__device__ __forceinline__ int64_t pair_of(bool causal, int64_t base, int64_t count, int64_t i, int64_t j) {
  return causal ? base * (base + 1) / 2 + i * (i + 1) / 2 + j : base * base + i * count + j;
}

}  // namespace layout
