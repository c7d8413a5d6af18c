// Shared memory of `backward_keys`, and what crosses it between its warps.
#pragma once

#include "hopper/backward_stored.cuh"

namespace backward {

constexpr int STAGES = D == 128 ? 3 : 5;
constexpr int WIDENERS = 3;  // warps

// Operands of a step; unscaled ones are wide as they come.
template <bool CODES>
struct StepOperands {
  uint8_t q[STEP_BYTES];
  uint8_t dout[STEP_BYTES];
  uint8_t q_wide[STEP_WIDE];
  uint8_t dout_wide[STEP_WIDE];
};
template <>
struct StepOperands<false> {
  union {
    uint8_t q[STEP_WIDE], q_wide[STEP_WIDE];
  };
  union {
    uint8_t dout[STEP_WIDE], dout_wide[STEP_WIDE];
  };
};

struct alignas(1024) Operands {
  using Stage = StepOperands<E4M3>;
  uint8_t k[TILE_BYTES];
  uint8_t v[TILE_BYTES];
  Stage stage[STAGES];
};

struct Owner {
  KeyColumns keys[2];  // of each half
  Record record;
};

struct Shared {
  Operands operands;
  alignas(128) uint8_t x[CONSUMERS / 32][PIECE_BYTES];  // on its way to global memory
  QueryColumns columns[STAGES];
  alignas(16) float exponents[STAGES][STEP];  // of q, where it is widened
  Owner owner[2];
  Step steps[STAGES];
  uint64_t full[STAGES], empty[STAGES];
  uint64_t dout_widened[STAGES], q_widened[STAGES];
  uint64_t k_full[1], v_full[1], keys_empty[1];
  uint64_t owner_full[2], owner_empty[2];
};
static_assert(sizeof(Shared) <= 227 * 1024, "the shared memory of one CTA");

__device__ __forceinline__ void init_barriers(Shared& s) {
  constexpr uint32_t BY_CONSUMERS = CONSUMERS / 32 * ptx::WARP_ARRIVALS, BY_WIDENERS = WIDENERS * ptx::WARP_ARRIVALS;
  init_barriers(s.full, 1);
  init_barriers(s.empty, BY_CONSUMERS);  // the wideners' too: every step has consumers that wait for them
  init_barriers(s.dout_widened, BY_WIDENERS);
  init_barriers(s.q_widened, BY_WIDENERS);
  init_barriers(s.k_full, 1);
  init_barriers(s.v_full, 1);
  init_barriers(s.keys_empty, BY_CONSUMERS);
  init_barriers(s.owner_full, 1);
  init_barriers(s.owner_empty, BY_CONSUMERS);
}

}  // namespace backward
