// What the kernels of the backward share: parameters, records of work, what a step knows of its rows and columns, and
// products.
//
// Note [Two products]
// ~~~~~~~~~~~~~~~~~~~
// `backward_keys` owns 128 keys of a KV head and walks the queries that see them: dK, dV. It makes S, dP, P and X, and
// leaves X for `backward_dq`, which only multiplies it: Note [Stored X]. Both sum in the ascending order of Note
// [Backward] of flamia.reference.backward in their own registers: deterministic without an atomic. P and X are
// those of Note [Own exponents] of flamia.reference.profiles.
//
// A CTA of `backward_keys` has two consumer warpgroups of 64 rows each, and one more: one of its warps takes items and
// starts copies, the others make wide tiles, if that is done here (Note [Widening]).
//
// Note [Widening]
// ~~~~~~~~~~~~~~~
// Products over channels read q and dO' as E4M3, those over tokens as bfloat16. (Unscaled, both read one tile, Note [Wide
// tile].) The wide copies are made in one of two ways, with the same bits. Without WIDENS `row_pass_wide` and
// `backward_operands` write them to memory, and a step fetches both kinds: best for long documents, whose steps read them
// again and again from L2. With WIDENS the other three warps of the third warpgroup make them in shared memory from the
// codes: a third of the bytes, and no copies in memory, for instructions beside those of the consumers. The host chooses,
// by the tokens per document.
//
// Note [Fast steps]
// ~~~~~~~~~~~~~~~~~
// Powers of two commute with rounding as long as nothing leaves the normal numbers. A step whose scales and tops are
// finite and usual (`check_*`) therefore folds its factors as it likes:
//   P = Note [Bits of P] of fl(acc 2^eK) and c 2^eQ
//   X = fl(P fma(acc, 2^e of V 2^e of dO, -delta)), two at a time: cut to their upper halves, plus half a unit of the last
//       place that is kept, cut again. A number that is cut first is not on another side of any middle between two, and a
//       middle is rounded away from zero.
// Unscaled, all of these powers are 1, and X is rounded to even.
// So the numbers are those of the reference, whose scaled scores and dP are products with powers of two too, and exact. A
// product of dP is a multiple of 2^-138 at least, which a subnormal number holds. Hidden scores are as low as can be: P =
// +0, and X = 0 for any finite dP. A row with top = +inf has P = +0 and X = 0.
// All other steps take the operations of the reference one by one (`slow_step`). Which they are is known from their rows
// and columns before there is a product.
#pragma once

#include "common/tokens.cuh"
#include "hopper/exp2.cuh"
#include "hopper/tiles.cuh"

struct BackwardParams {
  const uint8_t* q;      // (q_heads, max_tiles, 128 ROW_BYTES), E4M3; or unscaled, as q_wide
  const uint8_t* k;      // (kv_heads, ...)
  const uint8_t* v;
  const uint8_t* dout;   // (q_heads, ...)
  uint8_t* q_wide;           // (q_heads, max_tiles, 256 D), values in bfloat16, 0 for a lost token; null: Note [Widening]
  const uint8_t* dout_wide;  // (q_heads, ...)
  const float* q_exponents;  // (q_heads, max_tiles, 128), Note [Folded exponents]; of unscaled rows a bound
  const float* k_exponents;
  const float* v_exponents;
  const uint8_t* dout_scales;  // (q_heads, max_tiles, 512), one byte per token in column 0; of unscaled rows a bound
  const float* delta;          // (q_heads, max_tiles, 128)
  const float* top;
  Tokens first;   // dK of `backward_keys`, dQ of `backward_dq`
  Tokens second;  // dV of `backward_keys`
  uint8_t* q_columns;  // (q_heads, max_tiles, 2 halves, 784): Note [Columns]
  uint8_t* k_columns;  // (kv_heads, max_tiles, 2 halves, 528)
  float* scratch;  // (CTAs, 64, 256), for slow steps
  float* totals;   // (CTAs, D, 256): dK and dV of the heads of a group so far; unused if group == 1
  const layout::Tile* tiles;
  const int32_t* tile_offsets;
  const int4* items;  // document, head, first tile, cost
  const int32_t* status;
  int32_t* ticket;  // the next item, and how many CTAs have found none; both 0 before and after a launch
  int64_t max_tiles;
  int32_t group;
  int32_t causal;
  float c;  // fl(softmax_scale log2 e)
  float softmax_scale;
  int32_t c_usual;  // 0 makes every step a slow one
  int32_t kv_heads;
  uint8_t* x;     // (heads of the launch, pairs, 24576 or 32768): Note [Stored X]
  int64_t pairs;  // of a query head in `x`
  int32_t first_head;  // KV heads of this launch
  int32_t last_head;   // one past the last
  int32_t longest;     // tiles of a document at most
  int32_t unused;
};
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "BackwardParams must match structs.HOPPER_BACKWARD");

namespace backward {

using namespace hopper;

#if defined(RECIPE_IS_MXFP8)
constexpr bool E4M3 = true;
#elif defined(RECIPE_IS_BF16)
constexpr bool E4M3 = false;
#endif

#if defined(WIDENS)
// How wide copies of q and dO' come about: in shared memory, in memory, or (unscaled) they are what there is.
constexpr bool WIDENING = WIDENS, COPIED = E4M3 && !WIDENING;  // Note [Widening]
static_assert(E4M3 || !WIDENING, "there are no codes to widen");
#endif

constexpr int D = HEAD_DIM;
constexpr int TILE = layout::TILE;
constexpr int STEP = 64;  // tokens of a step
constexpr int CONSUMERS = 256;
constexpr int THREADS = CONSUMERS + 128;
constexpr int PANELS = D / 64;
constexpr int ROW_BYTES = E4M3 ? D : 2 * D;  // of what is contracted over channels
constexpr int TILE_BYTES = TILE * ROW_BYTES, STEP_BYTES = STEP * ROW_BYTES;
constexpr int STEP_PANEL = STEP * 128;              // bytes of 64 rows of a panel of a wide tile
constexpr int STEP_WIDE = PANELS * STEP_PANEL;
static_assert(D == 64 || D == 128, "the Hopper kernels take head_dim 64 and 128");

constexpr int F = E4M3 ? 3 : 7;  // fraction bits of P and X

__device__ __forceinline__ float infinity() { return __uint_as_float(formats::EXPONENT); }

enum Flag : uint32_t { SLOW = 1, DIAGONAL = 2, ENDS = 4, STOPS = 8 };

// ---- work ------------------------------------------------------------------------------------------------------

// The owner's tile, as warp 0 publishes it.
struct Record {
  int32_t valid;
  int32_t head;    // KV head
  int32_t tile;    // within the document
  int32_t first;   // slot of the document's first tile
  int32_t count;   // tiles of the document
  int32_t rows;    // tokens in the owner's tile
  int32_t last;    // tokens in the document's last tile
  int32_t start;   // packed index of the owner's first token
};

// The value of lane 0, which the compiler then knows to be the same in the whole warp: wgmma must not stand in a branch
// that could divide one.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return ptx::shfl_idx(x, 0); }

// Note [Columns]
// ~~~~~~~~~~~~~~
// What a step needs of its 64 queries, and an owner of its 64 keys, beside the operands: `backward_operands` writes it
// once, and it is copied with the operands.
struct alignas(16) QueryColumns {
  float4 score[STEP / 2];  // of each pair of queries: c 2^eQ UNIT twice, K of Note [Bits of P] twice
  float2 delta[STEP / 2];  // -delta of each
  float factor[2];         // 2^e of dO, of each block of 32
  uint32_t flags[2];
};
struct alignas(16) KeyColumns {
  float2 factors[STEP];  // 2^eK, 2^eV
  uint32_t flags[2];     // of each block of 32
  uint32_t unused[2];
};
static_assert(sizeof(QueryColumns) == 784 && sizeof(KeyColumns) == 528, "as in kernels/hopper_backward.py");

// What the fetching warp says of a step.
struct Step {
  uint8_t* x;     // where this half of the pair lies: Note [Stored X]
  int32_t tile;
  int32_t half;   // of the tile
  uint32_t bits;  // DIAGONAL: queries and keys of one tile, and causal; ENDS: the last step for the owner and a query head;
                  // STOPS: no step, and no more work
  uint32_t unused;
};

// Query and key of an entry, within their tiles.
struct Place {
  int query;
  int key;
};

// Which entries of a tile are hidden for their position.
struct Hidden {
  bool diagonal;  // those with the key after the query
  int32_t rows;   // keys of the document in the key tile
  __device__ __forceinline__ bool operator()(int query, int key) const { return diagonal ? key > query : key >= rows; }
};

// ---- numbers ---------------------------------------------------------------------------------------------------

// 2^e for an integral e of an E8M0 scale or its negative, -127..127; NaN stays.
__device__ __forceinline__ float exp2_scale(float e) {
  if (e != e) return e;
  return e < -126.0f ? 0x1p-127f : __uint_as_float(uint32_t(int(e) + 127) << 23);
}

// 2^(byte - 127); NaN for byte 255.
__device__ __forceinline__ float decode_scale(uint32_t byte) {
  return byte == formats::E8M0_NAN ? __uint_as_float(0x7FC00000u) : formats::decode_e8m0(byte);
}

// 2^e of a token; 1 of an unscaled one, whose exponent is only a bound. NaN of a lost one.
__device__ __forceinline__ float token_scale(float e) { return E4M3 ? exp2_scale(e) : e == e ? 1.0f : e; }

// Whether an exponent of Q or K, of V, a byte of dO, a row of dO is usual: Note [Fast steps]. False for NaN. Unscaled,
// they bound the numbers: below 2^e, and 2^(byte - 118).
__device__ __forceinline__ bool check_exponent(float e) { return E4M3 ? e >= -20.0f && e <= 2.0f : e <= 60.0f; }
__device__ __forceinline__ bool check_v(float e) { return E4M3 ? e >= -30.0f && e <= 30.0f : e <= 60.0f; }
__device__ __forceinline__ bool check_dout(uint32_t byte) { return E4M3 ? byte >= 37 && byte <= 157 : byte <= 177; }
__device__ __forceinline__ bool check_row(float top, float delta) {
  return top > -0x1p20f && top < BITS_TOP && fabsf(delta) < 0x1p100f;
}

// As low as a score need be to be hidden: c 2^eQ times it is below -2^21 in a fast step.
constexpr float HIDDEN_SCORE = -0x1p120f;

// ---- barriers --------------------------------------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void init_barriers(uint64_t (&barriers)[N], uint32_t arrivals) {
#pragma unroll
  for (int i = 0; i < N; ++i) ptx::mbarrier_init(ptx::shared_address(&barriers[i]), arrivals);
}

// ---- operands --------------------------------------------------------------------------------------------------

// X of two numbers as a bfloat16 pair, rounded to F fraction bits.
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  if constexpr (!E4M3) return ptx::cvt_rn_bf16x2_f32(high, low);
  const uint32_t cut = ptx::prmt(__float_as_uint(low), __float_as_uint(high), 0x7632);
  return (cut + 0x00080008u) & 0xFFF0FFF0u;
}

__device__ __forceinline__ float unpack(const uint32_t (&a)[16], int i) {
  return __uint_as_float(i % 2 == 0 ? a[i / 2] << 16 : a[i / 2] & 0xFFFF0000u);
}

// Note [Moving descriptors]
// ~~~~~~~~~~~~~~~~~~~~~~~~~
// Products name their operands by descriptors. The one of a stage is that of stage 0, which does not change, and its
// distance, in units of 16 bytes: an addition per product.

// d = A B^T over channels; a at row 0 of 64 of a tile, b of a step, `distance` bytes further.
constexpr int WIDTH = ROW_BYTES < 128 ? ROW_BYTES : 128;  // of a panel
__device__ __forceinline__ void multiply_channels(float (&d)[32], uint32_t a, uint32_t b, uint32_t distance) {
  const uint64_t da = describe_k_major<WIDTH>(a), db = describe_k_major<WIDTH>(b) + distance / 16;
#pragma unroll
  for (int k = 0; k < ROW_BYTES / 32; ++k) {
    const int panel = k / 4, piece = 2 * (k % 4);
    if constexpr (E4M3) {
      ptx::wgmma_e4m3_ss<64>(d, da + piece, db + piece, k != 0);
    } else {
      ptx::wgmma_bf16_ss<64>(d, da + panel * (PANEL_BYTES / 16) + piece, db + panel * (STEP_PANEL / 16) + piece, k != 0);
    }
  }
}

// d += A B over 16 STEPS tokens; b: rows of a wide tile, `distance` bytes further.
template <int STEPS>
__device__ __forceinline__ void multiply_tokens(float (&d)[D / 2], const uint32_t* a, uint32_t b, uint32_t distance) {
  const uint64_t db = describe_mn_major(b, STEP_PANEL) + distance / 16;
#pragma unroll
  for (int k = 0; k < STEPS; ++k) ptx::wgmma_bf16_rs<D>(d, a + 4 * k, db + k * MN_STEP, 1);
}

// The compiler must not move uses of these registers past this point: it does not know when a wgmma is done with them.
template <class T, int N>
__device__ __forceinline__ void keep_all(T (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) ptx::keep(x[i]);
}

// The same numbers in other registers: those of an A operand must not be read while a wgmma does.
template <int FROM, int TO, int N>
__device__ __forceinline__ void copy_all(uint32_t (&to)[N], const uint32_t (&from)[N]) {
#pragma unroll
  for (int i = FROM; i < TO; ++i) to[i] = ptx::mov_b32(from[i]);
}

template <int N>
__device__ __forceinline__ void forget_all(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) ptx::forget(x[i]);
}

// Start to copy 64 rows of a tile with rows of BYTES.
template <int BYTES>
__device__ __forceinline__ void copy_step(uint32_t to, const uint8_t* tile, int half, uint32_t barrier) {
  constexpr int PANEL = STEP * (BYTES < 128 ? BYTES : 128);
#pragma unroll
  for (int i = 0; i < STEP * BYTES / PANEL; ++i) {
    ptx::cp_async_bulk_shared_global(to + i * PANEL, tile + (2 * i + half) * PANEL, PANEL, barrier);
  }
}

}  // namespace backward
