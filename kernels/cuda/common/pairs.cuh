// Numbers of the pairs of a query tile and a key tile that meet: where a tile that one kernel of a backward stores for
// another lies.
#pragma once

#include "common/ptx.cuh"

namespace layout {

// The number of query tile i and key tile j of a document, within a query head. The document's first tile is `base` of
// the pack, it has `count` of them, and no document has more than `longest`. A document of n <= longest tiles has n^2 <=
// n longest pairs, or n (n + 1) / 2 <= n (longest + 1) / 2 if causal: so the pairs of a pack of m tiles have different
// numbers below m longest, or m (longest + 1) / 2.
__device__ __forceinline__ int64_t pair_of(bool causal, int64_t longest, int64_t base, int64_t count, int64_t i, int64_t j) {
  return causal ? base * (longest + 1) / 2 + i * (i + 1) / 2 + j : base * longest + i * count + j;
}

}  // namespace layout
