// Sizes of Note [Factor tile] and Note [Fold tile], which hopper/operands.cu defines and writes.
#pragma once

#include "common/layout.cuh"

namespace hopper {

constexpr int FACTOR_WORDS = layout::TILE + 4;
constexpr int FOLD_WORDS = 2 * layout::TILE;

// Exponents of token scales up to this magnitude are usual: no product of two of them and c leaves the normal numbers.
constexpr float USUAL_EXPONENT = 60.0f;

// The last words of a factor tile.
struct KeyTile {
  int32_t first_lost_k;
  int32_t first_lost_v;
  float largest_exponent;
  int32_t unusual;
};
static_assert(sizeof(KeyTile) == 16, "one 16-byte load");

}  // namespace hopper
