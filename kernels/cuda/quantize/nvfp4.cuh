// NVFP4: the CUDA form of flamia.reference.nvfp4, whose notes define every step and its order.
//
// Note [Lanes of a token in NVFP4]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A lane has 32 adjacent channels of one token: two blocks, whose scales need no other lane, 16 bytes of codes, one
// store, and five of the rotation's seven strides (D = 128). A warp takes its own tokens, from the places where its
// lanes have fetched them (Note [Places in a stage]).
#pragma once

#include "common/tokens.cuh"

namespace nvfp4 {

constexpr int BLOCK = 16;     // channels per scale
constexpr int CHANNELS = 32;  // of a lane

// A scale tile holds 64 channels, and so do the tiles of the payload.
template <int D>
constexpr bool AVAILABLE = D % 64 == 0;

template <class R>
struct Lanes {
  static constexpr int LANES = warp_power_of_two(R::D / CHANNELS);  // of a token
  static constexpr int AT_ONCE = 32 / LANES;
  static constexpr int STEPS = R::TOKENS / AT_ONCE;
  static_assert(R::TOKENS % AT_ONCE == 0, "a warp's tokens are read in whole steps");

  __device__ static __forceinline__ int lane() { return threadIdx.x % LANES; }
  __device__ static __forceinline__ bool has_channels() { return CHANNELS * LANES == R::D || lane() < R::D / CHANNELS; }
  // Among the warp's tokens.
  __device__ static __forceinline__ int token(int step) { return step * AT_ONCE + threadIdx.x % 32 / LANES; }

  // Place of the first piece that this lane reads in step 0; those of a step lie PLACES after those of the one before.
  __device__ static __forceinline__ int first_place() {
    return R::group_place(token(0) * R::ROW_PIECES + lane() * R::GROUP);
  }
  static constexpr int PLACES = AT_ONCE * R::ROW_PIECES / 32 * R::THREADS;
  static_assert(AT_ONCE * R::ROW_PIECES % 64 == 0, "a step is whole rows of 32 pieces, exchanged alike");

  // Of a ballot, the bits of the lanes of this lane's token.
  __device__ static __forceinline__ uint32_t of_token(uint32_t ballot) {
    return ballot & (0xFFFFFFFFu >> (32 - LANES)) << (threadIdx.x % 32 / LANES * LANES);
  }
};

// ---- Note [Hadamard rotation] ----------------------------------------------------------------------------------

// Signs of 32 channels to a word, 1 for -1: bit 15 - j is that of channel 2 j, bit 31 - j that of channel 2 j + 1, so
// that a shift by j brings both to the sign bits of two halves. Channel c of a word w is negative where 32 w + c + 1
// is no square modulo 257.
__constant__ const uint32_t NEGATIVE[8] = {0x2E547044, 0x3130BF71, 0x8FABB676, 0x2F02BE53,
                                           0xCA7D40F4, 0x6E6DD5F1, 0x8EFD0C8C, 0x220E2A74};

template <class R>
__device__ __forceinline__ void flip_signs(uint4 (&piece)[R::GROUP]) {
  const uint32_t negative = NEGATIVE[Lanes<R>::lane()];
#pragma unroll
  for (int k = 0; k < R::GROUP; ++k) {
    uint32_t* const words[4] = {&piece[k].x, &piece[k].y, &piece[k].z, &piece[k].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 4 * k + i;
      if (R::Element::BYTES == 2) {
        *words[i] ^= negative << j & 0x80008000u;
      } else {
        *words[i] ^= negative << (j % 2 == 0 ? 16 + j / 2 : j / 2) & formats::SIGN;
      }
    }
  }
}

// fl(1 / sqrt(n)), the last factor of the rotation. Where it is a power of two it can wait until the elements meet the
// factor of their block: products are then the same unless they are subnormal.
template <class R>
struct Norm {
  static constexpr int ORDER = R::D & -R::D;
  static_assert(ORDER == 64 || ORDER == 128 || ORDER == 256, "fl(1 / sqrt(ORDER)) is known");
  static constexpr bool CAN_WAIT = ORDER != 128;
  __device__ static __forceinline__ float get() {
    return ORDER == 64 ? 0.125f : ORDER == 128 ? __uint_as_float(0x3DB504F3u) : 0.0625f;
  }
};

// But for the factor Norm.
template <class R>
__device__ __forceinline__ void rotate_channels(float (&x)[CHANNELS]) {
  constexpr int ORDER = Norm<R>::ORDER;
  static_assert(ORDER >= CHANNELS, "a diagonal block of H spans whole lanes");
#pragma unroll
  for (int stride = 1; stride < CHANNELS; stride *= 2) {
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) {
      if (i & stride) continue;
      const float a = x[i], b = x[i | stride];
      x[i] = __fadd_rn(a, b);
      x[i | stride] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int lanes = 1; lanes < ORDER / CHANNELS; lanes *= 2) {
    const float sign = Lanes<R>::lane() & lanes ? -1.0f : 1.0f;  // the product is exact: other + own, or other - own
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) {
      const float other = __uint_as_float(ptx::shfl_bfly(__float_as_uint(x[i]), lanes));
      x[i] = __fmaf_rn(x[i], sign, other);
    }
  }
}

// ---- Note [NVFP4] ----------------------------------------------------------------------------------------------

// Largest magnitude of block b; NaN if one is NaN.
template <class R>
__device__ __forceinline__ float block_amax(const float (&x)[CHANNELS], int b) {
  float amax = x[b * BLOCK];
#pragma unroll
  for (int i = 1; i < BLOCK; ++i) amax = ptx::max_nan_xorsign_abs_f32(amax, x[b * BLOCK + i]);
  return fabsf(amax);
}

// The same of the elements as given.
template <class R>
__device__ __forceinline__ float block_amax(const uint4 (&piece)[R::GROUP], int b) {
  constexpr int PIECES = R::GROUP / 2;
  uint32_t packed = R::packed_amax(piece[b * PIECES]);
#pragma unroll
  for (int k = 1; k < PIECES; ++k) packed = R::Element::larger(packed, R::packed_amax(piece[b * PIECES + k]));
  return R::Element::widen(R::unpack_amax(packed));
}

// Whether a step also makes the E4M3 codes of its tokens. Where a CTA has 512 threads, registers do not suffice.
template <class R>
constexpr bool TOGETHER = R::THREADS < 512;

// Where those codes go, in token blocks of 1; `payload` may be null. `byte` and `zero` are those of each row.
struct Blocks {
  uint8_t* payload;
  uint8_t* byte;
  uint8_t* zero;
};

// Token blocks of 1 of this lane's channels.
template <class R>
__device__ __forceinline__ void quantize_blocks(const uint4 (&piece)[R::GROUP], int row, const Blocks& to) {
  uint32_t packed = R::packed_amax(piece[0]);
#pragma unroll
  for (int k = 1; k < R::GROUP; ++k) packed = R::Element::larger(packed, R::packed_amax(piece[k]));
#pragma unroll
  for (int lanes = 1; lanes < Lanes<R>::LANES; lanes *= 2) {
    packed = R::Element::larger(packed, ptx::shfl_bfly(packed, lanes));
  }
  const TokenScale<R> scale(R::unpack_amax(packed));
  if (Lanes<R>::lane() == 0) {
    to.byte[row] = scale.byte();
    to.zero[row] = scale.is_zero();
  }
  const float factor = scale.factor();
  uint32_t codes[CHANNELS / 4];
#pragma unroll
  for (int k = 0; k < R::GROUP; ++k) {
    float x[R::VALUES];
    widen_piece<R>(x, piece[k]);
#pragma unroll
    for (int i = 0; i < R::VALUES; i += 4) {
      codes[(R::VALUES * k + i) / 4] =
          formats::encode_e4m3x4(__fmul_rn(x[i], factor), __fmul_rn(x[i + 1], factor), __fmul_rn(x[i + 2], factor),
                                 __fmul_rn(x[i + 3], factor));
    }
  }
  if (ptx::vote_ballot(scale.lost)) {  // rare
#pragma unroll
    for (int i = 0; i < CHANNELS / 4; ++i) codes[i] = scale.lost ? 0 : codes[i];
  }
  if (!Lanes<R>::has_channels()) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    ptx::st_global_v4(to.payload + layout::payload_offset<R::D>(row, Lanes<R>::lane() * CHANNELS + 16 * half),
                      make_uint4(codes[4 * half], codes[4 * half + 1], codes[4 * half + 2], codes[4 * half + 3]));
  }
}

// The tokens of one step, whose pieces lie from `first` on: codes to `payload`, scale bytes to `scales[row]`. `rows`:
// those of the tile; zeros past them.
template <class R, int WORDS>
__device__ __forceinline__ void quantize_step(const uint4* stage, int first, int step, int rows, bool hadamard,
                                              float2 head_scale, const Blocks& blocks, uint8_t* payload,
                                              uint32_t (*scales)[WORDS]) {
  constexpr float FLT_MAX = 3.40282346638528859812e38f;
  constexpr int BLOCKS = CHANNELS / BLOCK;
  const int row = R::warp() * R::TOKENS + Lanes<R>::token(step);
  uint4 piece[R::GROUP];
#pragma unroll
  for (int k = 0; k < R::GROUP; ++k) piece[k] = stage[first ^ k];
  if constexpr (TOGETHER<R>) {
    if (blocks.payload != nullptr) quantize_blocks<R>(piece, row, blocks);
  }
  if (hadamard) flip_signs<R>(piece);
  float x[CHANNELS], amax[BLOCKS];
#pragma unroll
  for (int i = 0; i < CHANNELS; ++i) x[i] = R::widen(piece[i / R::VALUES], i % R::VALUES);
  float later = 1.0f;  // a factor of the elements that is still to come
  if (hadamard) {
    rotate_channels<R>(x);
    if (Norm<R>::CAN_WAIT) {
      later = Norm<R>::get();
    } else {
#pragma unroll
      for (int i = 0; i < CHANNELS; ++i) x[i] = __fmul_rn(x[i], Norm<R>::get());
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) amax[b] = __fmul_rn(block_amax<R>(x, b), later);
  } else {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) amax[b] = block_amax<R>(piece, b);
  }

  const float m = __fmul_rn(head_scale.x, __uint_as_float(0x3E2AAAABu) /* fl(1/6) */);
  uint32_t scale[BLOCKS];
  float inv[BLOCKS], factor[BLOCKS];
  const bool used = row < rows;
  bool fits = used, finite = true;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    scale[b] = formats::encode_ue4m3(fminf(__fmul_rn(amax[b], m), FLT_MAX));
    inv[b] = fminf(ptx::rcp_rn_f32(__fmul_rn(formats::decode_e4m3(scale[b]), head_scale.y)), FLT_MAX);
    const bool zero = amax[b] == 0.0f;  // zeros keep their signs under any factor
    factor[b] = zero ? 1.0f : __fmul_rn(inv[b], later);
    fits &= zero || (amax[b] >= 0x1p-64f && formats::fits_e2m1x8(amax[b], inv[b]));
    finite &= __float_as_uint(amax[b]) < formats::EXPONENT;
  }
  bool lost = false;
  if (ptx::vote_ballot(!fits)) {  // rare: no token, one that is not finite, a scale that saturates or underflows
    lost = Lanes<R>::of_token(ptx::vote_ballot(!finite)) != 0;
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) {
      const float clipped = fminf(fmaxf(__fmul_rn(__fmul_rn(x[i], later), inv[i / BLOCK]), -6.0f), 6.0f);
      x[i] = lost || !used ? 0.0f : clipped;
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) factor[b] = 1.0f;
  }

  uint32_t codes[CHANNELS / 8];
#pragma unroll
  for (int i = 0; i < CHANNELS / 8; ++i) codes[i] = formats::encode_e2m1x8(x + 8 * i, factor[8 * i / BLOCK]);
  if (!Lanes<R>::has_channels()) return;
  ptx::st_global_v4(payload + layout::payload_offset<R::D / 2>(row, Lanes<R>::lane() * (CHANNELS / 2)),
                    make_uint4(codes[0], codes[1], codes[2], codes[3]));
  reinterpret_cast<uint16_t*>(scales[row])[Lanes<R>::lane()] =
      lost ? formats::UE4M3_NAN * 0x101u : scale[0] | scale[1] << 8;
}

// The tokens of this warp, once its lanes have fetched them.
template <class R, int WORDS>
__device__ __forceinline__ void quantize_warp(const uint4* stage, int rows, bool hadamard, float2 head_scale,
                                              const Blocks& blocks, uint8_t* payload, uint32_t (*scales)[WORDS]) {
  ptx::bar_warp_sync();
  int first = Lanes<R>::first_place();
#pragma unroll 1
  for (int step = 0; step < Lanes<R>::STEPS; ++step, first += Lanes<R>::PLACES) {
    quantize_step<R>(stage, first, step, rows, hadamard, head_scale, blocks, payload, scales);
  }
}

}  // namespace nvfp4
