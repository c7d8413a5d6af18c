// What some chips of the family have and others have not, behind one struct. The bits of the contract are the same on
// all.
#pragma once

#include "blackwell/ptx.cuh"

namespace blackwell {

#if defined(__CUDA_ARCH_FEAT_SM103_ALL)

// B300: loads of tensor memory return the largest word too; twice the exponentials.
struct Chip {
  static constexpr bool LOADS_WITH_MAXIMUM = true;
  static constexpr int HARDWARE_PAIRS_OF_16 = 12;

  // 128 columns, and their largest; NaN if one is.
  __device__ static __forceinline__ float load_with_maximum(float (&x)[128], uint32_t address) {
    float part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::tcgen05_ld_red_x32(x + 32 * i, part[i], address + 32 * i);
    ptx::tcgen05_wait_ld();
    return ptx::max_nan_f32(ptx::max_nan_f32(part[0], part[1], part[2]), part[3], part[3]);
  }
};

#else

// B200.
struct Chip {
  static constexpr bool LOADS_WITH_MAXIMUM = false;
  static constexpr int HARDWARE_PAIRS_OF_16 = 8;

  __device__ static __forceinline__ float load_with_maximum(float (&)[128], uint32_t) { return 0.0f; }
};

#endif

}  // namespace blackwell
