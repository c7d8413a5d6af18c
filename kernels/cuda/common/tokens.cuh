// Rows of the user's tensors: a warp reads several tokens at once, 16 bytes per lane and step.
//
// Note [Lanes of a token]
// ~~~~~~~~~~~~~~~~~~~~~~~
// A row of D elements is CHUNKS pieces of 16 bytes. LANES = the power of two from CHUNKS on, at most 32, lanes
// read one token, PER_LANE pieces each; with D = 128 in bf16 a warp reads two tokens of 16 lanes. The lanes of one
// token are aligned in the warp, so butterfly shuffles over 1, 2, ..., LANES / 2 lanes reduce over its channels.
// A CTA takes a tile of 128 tokens at a time: 8 warps with 16 consecutive tokens each, so that two share a token
// block of 32; or 16 warps with 8 tokens where more than 256 bytes are read per token.
//
// Note [Owners]
// ~~~~~~~~~~~~~
// To reduce a value of each token over its lanes, a warp reduces those of all its STEPS steps together: in each round
// of the butterfly a lane gives half of its values away and takes the partner's other half, so that in the end lane i
// of a token's lanes owns the result of step i modulo STEPS. 8 steps take 8 shuffles instead of 32, and what follows
// from the result, such as a scale, is computed once per token instead of in each of its lanes. Sums come out as the
// tree of adjacent pairs. STEPS never exceeds LANES.
//
// Note [Staging]
// ~~~~~~~~~~~~~~
// A CTA works on tile after tile. While it computes on one, the next is on its way into shared memory (cp.async), so
// that about 100 KB per multiprocessor are always in flight, which is what the memory's latency times its bandwidth
// asks for. A thread reads back what it fetched itself: it waits for its own copies, and no barrier is needed. What
// another lane of its warp fetched it reads after a barrier of the warp. Rows that do not start at a multiple of 16
// bytes are fetched element by element through registers.
//
// Note [Places in a stage]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// The pieces of a warp's tokens lie in their natural order, token by token, but for their place within each GROUP (32
// channels): piece j lies at place j ^ (j / 8 % GROUP). So they can be read in two ways without a bank conflict: by the
// lanes that fetched them, 32 pieces in a row, and group by group, each lane the same piece of its own group.
#pragma once

#include "common/formats.cuh"
#include "common/layout.cuh"

// A strided tensor (T, H, D), channels adjacent. Offsets are 64 bits.
struct Tokens {
  const void* data;
  int64_t token_stride;
  int64_t head_stride;
};

__device__ constexpr int warp_power_of_two(int n) { return n <= 1 ? 1 : 2 * warp_power_of_two((n + 1) / 2); }

// TENSORS: how many are read together, each with its own stage.
template <class Element_, int HEAD_DIM_, int TENSORS>
struct Rows {
  using Element = Element_;
  static constexpr int D = HEAD_DIM_;
  static constexpr int TOKEN_BYTES = D * Element::BYTES * TENSORS;
  static constexpr int WARPS = TOKEN_BYTES <= 256 ? 8 : 16;
  static constexpr int WARPS_PER_BLOCK = WARPS / layout::BLOCKS;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int VALUES = 16 / Element::BYTES;  // elements of a piece
  static constexpr int CHUNKS = D / VALUES;
  static constexpr int LANES = warp_power_of_two(CHUNKS) < 32 ? warp_power_of_two(CHUNKS) : 32;
  static constexpr int PER_LANE = (CHUNKS + LANES - 1) / LANES;
  static constexpr int AT_ONCE = 32 / LANES;  // tokens of a step
  static constexpr int TOKENS = layout::TILE / WARPS;
  static constexpr int STEPS = TOKENS / AT_ONCE;
  static_assert(D % 32 == 0 && D > 0 && D <= 256, "HEAD_DIM must be a multiple of 32 up to 256");
  static_assert(TOKENS % AT_ONCE == 0, "a warp's tokens are read in whole steps");

  // Note [Staging]: two stages where they fit twice or more often into a multiprocessor's shared memory.
  static constexpr int STAGES = TOKEN_BYTES <= 512 ? 2 : 1;
  static constexpr int STAGE_PIECES = THREADS * STEPS * PER_LANE;  // of one tensor
  static constexpr int GROUP = 32 / VALUES;                        // pieces of 32 channels
  static constexpr int ROW_PIECES = LANES * PER_LANE;              // places of a token

  __device__ static __forceinline__ int warp() { return threadIdx.x / 32; }
  // The lane's place among the lanes of its token.
  __device__ static __forceinline__ int lane() { return threadIdx.x % LANES; }
  // Row in the tile of the token that this lane reads in a step.
  __device__ static __forceinline__ int row(int step) {
    return warp() * TOKENS + step * AT_ONCE + threadIdx.x % 32 / LANES;
  }
  // First channel of the lane's piece.
  __device__ static __forceinline__ int channel(int piece) { return (lane() + piece * LANES) * VALUES; }
  __device__ static __forceinline__ bool has_piece(int piece) {
    return CHUNKS % LANES == 0 || lane() + piece * LANES < CHUNKS;
  }

  // Note [Places in a stage]: that of piece i = step * PER_LANE + p of this thread; a row of 32 pieces per warp and i.
  __device__ static __forceinline__ int place(int i) {
    return THREADS * i + (threadIdx.x ^ (threadIdx.x % 32 / 8 + 4 * i) % GROUP);
  }
  // The place of the first piece j of a group, of the tokens of this warp; piece j + k of the group lies at it ^ k.
  __device__ static __forceinline__ int group_place(int j) {
    return THREADS * (j / 32) + 32 * warp() + (j % 32 ^ j / 8 % GROUP);
  }

  // The largest of the values that the warps of token block b found.
  __device__ static __forceinline__ uint32_t over_block(const uint32_t* of_warp, int b) {
    uint32_t largest = 0;
#pragma unroll
    for (int w = 0; w < WARPS_PER_BLOCK; ++w) largest = max(largest, of_warp[b * WARPS_PER_BLOCK + w]);
    return largest;
  }

  // Start to fetch this thread's pieces of a tile; zeros past the tile's rows and past the row's end.
  __device__ static __forceinline__ void fetch(uint4* stage, const Tokens& x, const layout::Tile& tile, int head) {
    const int64_t stride = x.token_stride * Element::BYTES;
    const uint8_t* const first = static_cast<const uint8_t*>(x.data) + head * x.head_stride * Element::BYTES;
    const uint8_t* from = first + (int64_t(tile.start) + row(0)) * stride + channel(0) * Element::BYTES;
    if ((reinterpret_cast<uint64_t>(first) | stride) % 16 == 0) {
      const uint32_t shared = uint32_t(__cvta_generic_to_shared(stage));
      if (CHUNKS % LANES == 0 && tile.rows == layout::TILE) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step, from += AT_ONCE * stride) {
#pragma unroll
          for (int p = 0; p < PER_LANE; ++p) {
            ptx::cp_async_cg_16(shared + 16 * place(step * PER_LANE + p), from + p * LANES * 16, 16);
          }
        }
        return;
      }
#pragma unroll
      for (int step = 0; step < STEPS; ++step, from += AT_ONCE * stride) {
#pragma unroll
        for (int p = 0; p < PER_LANE; ++p) {
          const bool used = row(step) < tile.rows && has_piece(p);
          ptx::cp_async_cg_16(shared + 16 * place(step * PER_LANE + p), used ? from + p * LANES * 16 : first,
                              used ? 16 : 0);
        }
      }
    } else {
#pragma unroll 1
      for (int step = 0; step < STEPS; ++step, from += AT_ONCE * stride) {
#pragma unroll
        for (int p = 0; p < PER_LANE; ++p) {
          const bool used = row(step) < tile.rows && has_piece(p);
          stage[place(step * PER_LANE + p)] = used ? load_elements(from + p * LANES * 16) : make_uint4(0, 0, 0, 0);
        }
      }
    }
  }

  // 16 bytes, element by element.
  __device__ static __forceinline__ uint4 load_elements(const uint8_t* at) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (Element::BYTES == 4) {
        word[i] = ptx::ld_global_nc_b32(at + 4 * i);
      } else {
        word[i] = ptx::ld_global_nc_u16(at + 4 * i) | ptx::ld_global_nc_u16(at + 4 * i + 2) << 16;
      }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }

  // The pieces of one step straight from global memory.
  __device__ static __forceinline__ void load_step(uint4 (&piece)[PER_LANE], const Tokens& x, const layout::Tile& tile,
                                                   int head, int step) {
    const uint8_t* const first = static_cast<const uint8_t*>(x.data) + head * x.head_stride * Element::BYTES;
    const int64_t stride = x.token_stride * Element::BYTES;
    const uint8_t* const from = first + (int64_t(tile.start) + row(step)) * stride + channel(0) * Element::BYTES;
    const bool aligned = (reinterpret_cast<uint64_t>(first) | stride) % 16 == 0;
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p) {
      piece[p] = make_uint4(0, 0, 0, 0);
      if (row(step) < tile.rows && has_piece(p)) {
        piece[p] = aligned ? ptx::ld_global_nc_v4(from + p * LANES * 16) : load_elements(from + p * LANES * 16);
      }
    }
  }

  // The pieces of one step, once they have arrived.
  __device__ static __forceinline__ void read(uint4 (&piece)[PER_LANE], const uint4* stage, int step) {
#pragma unroll
    for (int p = 0; p < PER_LANE; ++p) piece[p] = stage[place(step * PER_LANE + p)];
  }

  // Largest element of a piece as `Element::larger` has it: two-byte elements stay two to a word.
  __device__ static __forceinline__ uint32_t packed_amax(const uint4& x) {
    return Element::larger(Element::larger(x.x, x.y), Element::larger(x.z, x.w));
  }

  // The same of all pieces that a lane has of a token.
  __device__ static __forceinline__ uint32_t piece_amax(const uint4 (&piece)[PER_LANE]) {
    uint32_t packed = packed_amax(piece[0]);
#pragma unroll
    for (int p = 1; p < PER_LANE; ++p) packed = Element::larger(packed, packed_amax(piece[p]));
    return packed;
  }

  // The magnitude, as an integer, which orders finite < Inf < NaN.
  __device__ static __forceinline__ uint32_t unpack_amax(uint32_t packed) {
    return Element::BYTES == 4 ? packed & formats::MAGNITUDE : max(packed & 0x7FFFu, packed >> 16 & 0x7FFFu);
  }

  // Note [Owners]: the values of the lane's own token, combined over its lanes.
  template <class Combine>
  __device__ static __forceinline__ uint32_t reduce(uint32_t (&value)[STEPS], Combine combine) {
    static_assert(STEPS <= LANES, "every step has an owner among the lanes of its token");
#pragma unroll
    for (int lanes = 1; lanes < STEPS; lanes *= 2) {
      const bool odd = threadIdx.x & lanes;
#pragma unroll
      for (int i = 0; i < STEPS / (2 * lanes); ++i) {
        const uint32_t kept = odd ? value[2 * i + 1] : value[2 * i], given = odd ? value[2 * i] : value[2 * i + 1];
        value[i] = combine(kept, ptx::shfl_bfly(given, lanes));
      }
    }
#pragma unroll
    for (int lanes = STEPS; lanes < LANES; lanes *= 2) value[0] = combine(value[0], ptx::shfl_bfly(value[0], lanes));
    return value[0];
  }
  // Row in the tile of the token that this lane owns.
  __device__ static __forceinline__ int owned_row() { return row(threadIdx.x % STEPS); }
  // Of several lanes that own the same token, the one that speaks for it.
  __device__ static __forceinline__ bool is_first_owner() { return lane() < STEPS; }
  // What the owner of this lane's token in a step has.
  __device__ static __forceinline__ uint32_t from_owner(uint32_t value, int step) {
    return ptx::shfl_idx(value, threadIdx.x % 32 / LANES * LANES + step);
  }
  // Of a ballot, the bits of the lanes of this lane's token.
  __device__ static __forceinline__ uint32_t of_token(uint32_t ballot) {
    return ballot & (0xFFFFFFFFu >> (32 - LANES)) << (threadIdx.x % 32 / LANES * LANES);
  }

  // The largest magnitude of the owned token, from the packed magnitudes of each step.
  __device__ static __forceinline__ uint32_t owned_amax(uint32_t (&packed)[STEPS]) {
    return unpack_amax(reduce(packed, [](uint32_t a, uint32_t b) { return Element::larger(a, b); }));
  }

  // The i-th element of a piece as float32.
  __device__ static __forceinline__ float widen(const uint4& x, int i) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
    if (Element::BYTES == 4) return Element::widen(words[i]);
    return Element::widen(i % 2 == 0 ? words[i / 2] & 0xFFFF : words[i / 2] >> 16);
  }
};

// All elements of a piece as float32.
template <class R>
__device__ __forceinline__ void widen_piece(float (&x)[R::VALUES], const uint4& piece) {
#pragma unroll
  for (int i = 0; i < R::VALUES; ++i) x[i] = R::widen(piece, i);
}

// E4M3 codes of a piece's elements times `factor`, VALUES / 4 words; zeros if the factor is 0, which marks a lost
// token, whose elements may be NaN.
template <class R>
__device__ __forceinline__ void encode_piece(uint32_t (&codes)[R::VALUES / 4], const float (&x)[R::VALUES],
                                             float factor) {
#pragma unroll
  for (int i = 0; i < R::VALUES / 4; ++i) {
    const uint32_t word = formats::encode_e4m3x4(__fmul_rn(x[4 * i], factor), __fmul_rn(x[4 * i + 1], factor),
                                                 __fmul_rn(x[4 * i + 2], factor), __fmul_rn(x[4 * i + 3], factor));
    codes[i] = factor == 0.0f ? 0 : word;
  }
}

// The scale of a token block of 1, from the token's largest magnitude (`Rows::unpack_amax`).
template <class R>
struct TokenScale {
  // Largest amax whose payload is all zero: 2^-137 * 2^127 = 2^-10 is halfway to the smallest code and rounds to 0.
  static constexpr uint32_t ZERO_AMAX = 0x00001000u;

  bool lost;   // an element is not finite
  float amax;  // 0 if lost
  uint32_t finite_byte;

  __device__ __forceinline__ explicit TokenScale(uint32_t magnitude) {
    lost = magnitude >= R::Element::INFINITE;
    amax = lost ? 0.0f : R::Element::widen(magnitude);
    finite_byte = formats::rceil_e4m3(amax);
  }
  __device__ __forceinline__ uint32_t byte() const { return lost ? formats::E8M0_NAN : finite_byte; }
  // What the elements are multiplied by before they are encoded; 0: all codes are 0.
  __device__ __forceinline__ float factor() const { return lost ? 0.0f : formats::inverse_e8m0(finite_byte); }
  __device__ __forceinline__ bool is_zero() const { return !lost && __float_as_uint(amax) <= ZERO_AMAX; }
};

// Store a piece's codes to its place in a payload tile.
template <class R>
__device__ __forceinline__ void store_codes(uint8_t* tile, int row, int channel,
                                            const uint32_t (&codes)[R::VALUES / 4]) {
  uint8_t* const to = tile + layout::payload_offset<R::D>(row, channel);
  if constexpr (R::VALUES == 8) {
    ptx::st_global_v2(to, codes[0], codes[1]);
  } else {
    ptx::st_global_b32(to, codes[0]);
  }
}

// ---- tile after tile -------------------------------------------------------------------------------------------

// What a CTA works on: one tile of one head.
struct Unit {
  uint32_t tile;  // index in the tile table
  uint32_t head;
};

// Note [Order of units]
// ~~~~~~~~~~~~~~~~~~~~~
// Unit number n is of tile n / heads, so that the CTAs at work together read the same rows of the packed tensors. Its
// head is (n % heads + tile) % heads: each tile begins with another head, so that a CTA meets all of them, however the
// size of the grid and the number of heads agree, and the expensive ones are spread over the CTAs. Numbers of a CTA
// are gridDim.x apart, and nothing is divided after the first.
class Units {
 public:
  __device__ __forceinline__ Units(uint32_t tiles, uint32_t heads)
      : tiles_(tiles), heads_(heads), rest_(blockIdx.x % heads) {
    unit_.tile = blockIdx.x / heads;
    unit_.head = (rest_ + unit_.tile) % heads;
  }
  __device__ __forceinline__ bool exists() const { return unit_.tile < tiles_; }
  __device__ __forceinline__ Unit get() const { return unit_; }
  __device__ __forceinline__ void advance() {
    const uint32_t tiles = gridDim.x / heads_, rest = gridDim.x % heads_;
    rest_ += rest;
    const uint32_t carry = rest_ >= heads_;
    rest_ -= carry ? heads_ : 0;
    unit_.tile += tiles + carry;
    unit_.head += (tiles + rest) % heads_ + carry;
    unit_.head -= unit_.head >= heads_ ? heads_ : 0;
  }

 private:
  uint32_t tiles_, heads_, rest_ /* number % heads */;
  Unit unit_;
};

// All units of this CTA, each fetched while the one before is worked on: Note [Staging]. `fetch` starts a unit's copies
// into a stage, `work` is called when this thread's have arrived; both get the parity of the call, which tells apart
// what two units in a row use.
template <class R, int PIECES = R::STAGE_PIECES, class Fetch, class Work>
__device__ __forceinline__ void for_each_unit(Units units, const layout::Tile* tiles, uint4* stages, Fetch fetch,
                                              Work work) {
  if (!units.exists()) return;
  Unit unit = units.get(), next = unit;
  layout::Tile tile = tiles[unit.tile], next_tile = tile;
  units.advance();
  bool more = units.exists();
  if (more) next = units.get(), next_tile = tiles[next.tile];
  fetch(unit, tile, stages, 0);
  ptx::cp_async_commit_group();
#pragma unroll 1
  for (int parity = 0;; parity ^= 1) {
    uint4* const stage = stages + (R::STAGES == 2 ? parity * PIECES : 0);
    if (R::STAGES == 2) {
      if (more) fetch(next, next_tile, stages + (parity ^ 1) * PIECES, parity ^ 1);
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<1>();
    } else {
      ptx::cp_async_wait_group<0>();
    }
    units.advance();
    Unit after = next;
    layout::Tile after_tile = next_tile;
    const bool even_more = units.exists();
    if (even_more) after = units.get(), after_tile = tiles[after.tile];  // on its way while this tile is worked on
    work(unit, tile, stage, parity);
    if (!more) return;
    if (R::STAGES == 1) {
      fetch(next, next_tile, stages, parity ^ 1);
      ptx::cp_async_commit_group();
    }
    unit = next, tile = next_tile;
    next = after, next_tile = after_tile;
    more = even_more;
  }
}

// ---- scale tiles -----------------------------------------------------------------------------------------------

// Write the scale tiles "channels" of a tile, each row's byte once for each 32 channels: `byte[b]` is that of row
// 32 b + lane. By one warp.
template <int D>
__device__ __forceinline__ void store_block_scales(uint8_t* to, const uint32_t (&byte)[layout::BLOCKS], int lane) {
#pragma unroll
  for (int u = 0; u < (D + 127) / 128; ++u) {
    const int blocks = min(4, D / 32 - 4 * u);
    const uint32_t repeat = 0x01010101u >> (8 * (4 - blocks));
    ptx::st_global_v4(to + u * layout::SCALE_TILE_BYTES + 16 * lane,
                      make_uint4(byte[0] * repeat, byte[1] * repeat, byte[2] * repeat, byte[3] * repeat));
  }
}

// The same from the bytes of all 128 rows.
template <int D>
__device__ __forceinline__ void store_channel_scales(uint8_t* to, const uint8_t* byte, int lane) {
  const uint32_t rows[layout::BLOCKS] = {byte[lane], byte[lane + 32], byte[lane + 64], byte[lane + 96]};
  store_block_scales<D>(to, rows, lane);
}

// Write the scale tiles "tokens" of a tile: the four block bytes, packed in a word, for every channel. By one warp.
template <int D>
__device__ __forceinline__ void store_token_scales(uint8_t* to, uint32_t blocks, int lane) {
#pragma unroll
  for (int u = 0; u < (D + 127) / 128; ++u) {
    const int words = min(4, D / 32 - 4 * u);
    ptx::st_global_v4(to + u * layout::SCALE_TILE_BYTES + 16 * lane,
                      make_uint4(blocks, words > 1 ? blocks : 0, words > 2 ? blocks : 0, words > 3 ? blocks : 0));
  }
}
