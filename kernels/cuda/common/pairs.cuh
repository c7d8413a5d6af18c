// Numbers of the pairs of a query tile and a key tile that meet: where a tile that one kernel of a backward stores for
// another lies.
#pragma once

#include "common/ptx.cuh"

namespace layout {

// Note [Numbers of pairs]
// ~~~~~~~~~~~~~~~~~~~~~~~
// The pairs of a document of n tiles have n^2 numbers in a row, or n (n + 1) / 2 if causal, within a query head. Where they
// begin follows from the document alone, and leaves little room between documents. Let no document have more than N
// tiles. One of l tokens has n - 1 <= (l - 1) / 128 of them before the last, so of its pairs all but one,
//   n^2 - 1 = (n - 1) (n + 1) <= l (N + 1) / 128,  or  n (n + 1) / 2 - 1 = (n - 1) (n + 2) / 2 <= l (N + 2) / 256,
// have room in this share of its tokens, rounded down; and one has the document's number. So the pairs of T tokens and m
// documents have different numbers below T (N + 1) / 128 + m, or T (N + 2) / 256 + m.

// The first number of a document that begins at token `start` of the pack; none has more than `longest` tiles.
__device__ __forceinline__ int64_t first_pair(bool causal, int64_t longest, int64_t document, int64_t start) {
  return start * (causal ? longest + 2 : 2 * (longest + 1)) / 256 + document;
}

// The number of query tile i and key tile j of a document of `count` tiles, given the first one.
__device__ __forceinline__ int64_t pair_of(bool causal, int64_t first, int64_t count, int64_t i, int64_t j) {
  return first + (causal ? i * (i + 1) / 2 + j : i * count + j);
}

}  // namespace layout
