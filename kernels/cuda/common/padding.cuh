// Padding rows of outputs, the packed tokens past the last document, cleared on the way by a launch that runs
// anyway. A null pointer is skipped.
#pragma once

#include "common/tokens.cuh"

struct ClearRows {
  Tokens rows;  // strides in bytes
  int32_t heads;
  int32_t row_bytes;  // a multiple of 2
};

struct ClearValues {
  float* data;  // (heads, num_tokens)
  int64_t head_stride;
  int32_t heads;
  float value;
};

struct Padding {
  ClearRows rows[3];
  ClearValues values[3];
  int64_t num_tokens;
};

// A warp for each token.
__device__ __forceinline__ void clear_rows(const ClearRows& c, int64_t first, int64_t last) {
  uint8_t* const data = static_cast<uint8_t*>(const_cast<void*>(c.rows.data));
  if (data == nullptr) return;
  const uint64_t together =
      reinterpret_cast<uint64_t>(data) | c.rows.token_stride | c.rows.head_stride | static_cast<uint64_t>(c.row_bytes);
  const bool wide = together % 16 == 0;
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll 1
  for (int64_t token = first + blockIdx.x * warps + threadIdx.x / 32; token < last; token += gridDim.x * warps) {
    uint8_t* row = data + token * c.rows.token_stride;
#pragma unroll 1
    for (int head = 0; head < c.heads; ++head, row += c.rows.head_stride) {
      if (wide) {
#pragma unroll 1
        for (int i = 16 * lane; i < c.row_bytes; i += 512) ptx::st_global_v4(row + i, make_uint4(0, 0, 0, 0));
      } else {
#pragma unroll 1
        for (int i = 2 * lane; i < c.row_bytes; i += 64) ptx::st_global_u16(row + i, 0);
      }
    }
  }
}

__device__ __forceinline__ void clear_values(const ClearValues& c, int64_t first, int64_t last) {
  if (c.data == nullptr) return;
#pragma unroll 1
  for (int head = 0; head < c.heads; ++head) {
#pragma unroll 1
    for (int64_t token = first + blockIdx.x * blockDim.x + threadIdx.x; token < last; token += gridDim.x * blockDim.x) {
      c.data[head * c.head_stride + token] = c.value;
    }
  }
}

// By all threads of the grid.
__device__ __forceinline__ void clear_padding(const Padding& p, const int32_t* status) {
  const int64_t first = status[layout::NUM_USED];
  if (first >= p.num_tokens) return;
#pragma unroll 1
  for (int i = 0; i < 3; ++i) {
    clear_rows(p.rows[i], first, p.num_tokens);
    clear_values(p.values[i], first, p.num_tokens);
  }
}
