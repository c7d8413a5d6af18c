// From accumulators to gradients: sums over the heads of a group, and rows of the user's tensors.
#pragma once

#include "hopper/backward.cuh"

namespace backward {

// x = total + x, where the thread kept its total four numbers at a time.
__device__ __forceinline__ void add_rows(float (&x)[D / 2], const float* total) {
#pragma unroll
  for (int i = 0; i < D / 8; i += 4) {
    uint4 y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = ptx::ld_global_v4(total + (i + j) * 4 * CONSUMERS);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[4 * (i + j)] = __fadd_rn(__uint_as_float(y[j].x), x[4 * (i + j)]);
      x[4 * (i + j) + 1] = __fadd_rn(__uint_as_float(y[j].y), x[4 * (i + j) + 1]);
      x[4 * (i + j) + 2] = __fadd_rn(__uint_as_float(y[j].z), x[4 * (i + j) + 2]);
      x[4 * (i + j) + 3] = __fadd_rn(__uint_as_float(y[j].w), x[4 * (i + j) + 3]);
    }
  }
}

// Of four words in each of four lanes: lane q gets word q of the others, in their order.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const int q = ptx::thread_index() % 4;
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    const bool high = q & lanes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & lanes) continue;
      const uint32_t got = ptx::shfl_bfly(high ? w[i] : w[i | lanes], lanes);
      w[i] = high ? got : w[i];
      w[i | lanes] = high ? w[i | lanes] : got;
    }
  }
}

// Store the thread's part of a 64-row accumulator: row r at `row` + r of `out`, if below `rows`. In pieces of 16 bytes,
// where all rows start at one: a store of four bytes a lane fills half a sector of eight rows.
__device__ __forceinline__ void store_rows(const float (&x)[D / 2], const Tokens& out, int head, int64_t start, int row,
                                           int rows) {
  using Element = formats::Given;
  const uint64_t places = reinterpret_cast<uint64_t>(out.data) / Element::BYTES | out.token_stride | out.head_stride;
  const int quad = ptx::thread_index() % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + 8 * h;
    uint8_t* const to = static_cast<uint8_t*>(const_cast<void*>(out.data)) +
                        ((start + r) * out.token_stride + head * out.head_stride) * Element::BYTES;
    if (Element::BYTES == 2 && (places & 7) == 0) {
#pragma unroll
      for (int i = 0; i < D / 8; i += 4) {
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          w[j] = Element::narrow(x[4 * (i + j) + 2 * h]) | Element::narrow(x[4 * (i + j) + 2 * h + 1]) << 16;
        }
        transpose_quad(w);
        if (r < rows) ptx::st_global_v4(to + 16 * (i + quad), make_uint4(w[0], w[1], w[2], w[3]));
      }
      continue;
    }
    if (r >= rows) continue;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const uint32_t low = Element::narrow(x[4 * i + 2 * h]), high = Element::narrow(x[4 * i + 2 * h + 1]);
      uint8_t* const at = to + (8 * i + 2 * quad) * Element::BYTES;
      if (Element::BYTES == 2) {
        ptx::st_global_u16(at, low);
        ptx::st_global_u16(at + 2, high);
      } else {
        ptx::st_global_b32(at, low);
        ptx::st_global_b32(at + 4, high);
      }
    }
  }
}

}  // namespace backward
