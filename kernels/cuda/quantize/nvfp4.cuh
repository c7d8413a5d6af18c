// NVFP4: the CUDA form of flamia.reference.nvfp4, whose notes define every step and its order.
#pragma once

#include "common/tokens.cuh"

namespace nvfp4 {

constexpr int BLOCK = 16;  // channels per scale

// A scale tile holds 64 channels, and so do the tiles of the payload.
template <int D>
constexpr bool AVAILABLE = D % 64 == 0;

// ---- Note [Hadamard rotation] ----------------------------------------------------------------------------------

// Bit i of word w is set where the sign of channel 32 w + i is -1: where 32 w + i + 1 is no square modulo 257.
__constant__ const uint32_t NEGATIVE[8] = {0x0C8C2A74, 0x40F4D5F1, 0xB676BE53, 0x7044BF71,
                                           0x8EFD220E, 0xCA7D6E6D, 0x8FAB2F02, 0x2E543130};

template <class R>
__device__ __forceinline__ void rotate_channels(float (&x)[R::PER_LANE][R::VALUES]) {
  constexpr int ORDER = R::D & -R::D;
#pragma unroll
  for (int p = 0; p < R::PER_LANE; ++p) {
    const int channel = R::channel(p) % 256;
    const uint32_t negative = NEGATIVE[channel / 32] >> channel % 32;
#pragma unroll
    for (int i = 0; i < R::VALUES; ++i) x[p][i] = __uint_as_float(__float_as_uint(x[p][i]) ^ (negative >> i & 1) << 31);
  }
#pragma unroll
  for (int stride = 1; stride < ORDER; stride *= 2) {
    if (stride < R::VALUES) {  // within a piece
#pragma unroll
      for (int p = 0; p < R::PER_LANE; ++p) {
#pragma unroll
        for (int i = 0; i < R::VALUES; ++i) {
          if (i & stride) continue;
          const float a = x[p][i], b = x[p][i | stride];
          x[p][i] = __fadd_rn(a, b);
          x[p][i | stride] = __fsub_rn(a, b);
        }
      }
    } else if (stride < R::VALUES * R::LANES) {  // between lanes
      const int lanes = stride / R::VALUES;
      const float sign = R::lane() & lanes ? -1.0f : 1.0f;  // the FMA's product is exact: own + other, or other - own
#pragma unroll
      for (int p = 0; p < R::PER_LANE; ++p) {
#pragma unroll
        for (int i = 0; i < R::VALUES; ++i) {
          const float other = __uint_as_float(ptx::shfl_bfly(__float_as_uint(x[p][i]), lanes));
          x[p][i] = __fmaf_rn(x[p][i], sign, other);
        }
      }
    } else {  // between the pieces of a lane
      const int pieces = stride / (R::VALUES * R::LANES);
#pragma unroll
      for (int p = 0; p < R::PER_LANE; ++p) {
        if (p & pieces) continue;
#pragma unroll
        for (int i = 0; i < R::VALUES; ++i) {
          const float a = x[p][i], b = x[(p | pieces) % R::PER_LANE][i];
          x[p][i] = __fadd_rn(a, b);
          x[(p | pieces) % R::PER_LANE][i] = __fsub_rn(a, b);
        }
      }
    }
  }
  const float norm = __fdiv_rn(1.0f, __fsqrt_rn(float(ORDER)));
#pragma unroll
  for (int p = 0; p < R::PER_LANE; ++p) {
#pragma unroll
    for (int i = 0; i < R::VALUES; ++i) x[p][i] = __fmul_rn(x[p][i], norm);
  }
}

// ---- Note [NVFP4] ----------------------------------------------------------------------------------------------

// The tokens of one step: codes to `payload`, scale bytes to `scales[row]`. `used`: the row is a token of the tile.
template <class R, int WORDS>
__device__ __forceinline__ void quantize_step(const uint4 (&piece)[R::PER_LANE], int step, bool used, bool hadamard,
                                              float2 head_scale, uint8_t* payload, uint32_t (*scales)[WORDS]) {
  constexpr float FLT_MAX = 3.40282346638528859812e38f;
  float x[R::PER_LANE][R::VALUES];
#pragma unroll
  for (int p = 0; p < R::PER_LANE; ++p) widen_piece<R>(x[p], piece[p]);
  if (hadamard) rotate_channels<R>(x);

  uint32_t amax[R::PER_LANE], largest = 0;  // magnitudes as integers: finite < Inf < NaN
#pragma unroll
  for (int p = 0; p < R::PER_LANE; ++p) {
    amax[p] = 0;
#pragma unroll
    for (int i = 0; i < R::VALUES; ++i) amax[p] = max(amax[p], __float_as_uint(x[p][i]) & formats::MAGNITUDE);
#pragma unroll
    for (int lanes = 1; lanes < BLOCK / R::VALUES; lanes *= 2) amax[p] = max(amax[p], ptx::shfl_bfly(amax[p], lanes));
    largest = max(largest, amax[p]);
  }
  const bool lost = R::of_token(ptx::vote_ballot(largest >= formats::EXPONENT)) != 0;

  const float m = __fmul_rn(head_scale.x, __uint_as_float(0x3E2AAAABu) /* fl(1/6) */);
  const int row = R::row(step);
#pragma unroll
  for (int p = 0; p < R::PER_LANE; ++p) {
    const uint32_t scale = formats::encode_ue4m3(fminf(__fmul_rn(__uint_as_float(amax[p]), m), FLT_MAX));
    const float inv = fminf(ptx::rcp_rn_f32(__fmul_rn(formats::decode_e4m3(scale), head_scale.y)), FLT_MAX);
    uint32_t codes = 0;
#pragma unroll
    for (int i = 0; i < R::VALUES; i += 2) {
      codes |= formats::encode_e2m1x2(__fmul_rn(x[p][i], inv), __fmul_rn(x[p][i + 1], inv)) << 4 * i;
    }
    if (lost || !used) codes = 0;
    if (!R::has_piece(p)) continue;
    uint8_t* const to = payload + layout::payload_offset<R::D / 2>(row, R::channel(p) / 2);
    if constexpr (R::VALUES == 8) {
      ptx::st_global_b32(to, codes);
    } else {
      ptx::st_global_u16(to, codes);
    }
    if (R::channel(p) % BLOCK == 0) {
      const int block = R::channel(p) / BLOCK;
      reinterpret_cast<uint8_t*>(scales[row])[block] = !used ? 0 : lost ? formats::UE4M3_NAN : scale;
    }
  }
}

}  // namespace nvfp4
