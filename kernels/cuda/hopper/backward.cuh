// What the two kernels of the backward share: parameters, records of work, the numbers of Note [Backward] of
// flamia.reference.backward, and the exchange of maxima.
//
// Note [Two owners]
// ~~~~~~~~~~~~~~~~~
// `backward_keys` owns 128 keys of a KV head and walks the queries that see them: dK, dV. `backward_queries` owns 128
// queries and walks the keys that they see: dQ. Each computes S, dP, P and X itself, with the same bits, and sums in the
// ascending order of Note [Backward] in its own registers: deterministic without an atomic, for the price of two FP8
// products and the elementwise work twice. P and X go from the accumulators straight into the A operand of the next
// wgmma.
//
// A CTA has two consumer warpgroups of 64 rows each, and one more of which one warp takes items and starts copies.
//
// Note [Fast tiles]
// ~~~~~~~~~~~~~~~~~
// Powers of two commute with rounding as long as nothing leaves the normal numbers. A step whose scales are finite and
// usual (`check_*`) therefore folds its factors as it likes:
//   w = fl(acc 2^eK) (c 2^eQ);  t = floor(w) - m + K and f = fl(w - floor(w)) by the magic addend K = MAGIC + 127
//   P = E4M3(p 2^(t - K - E + 8)) 2^(E - 8); the code of a positive E4M3 number, shifted by four bits, is the bfloat16
//       number that is 2^120 times smaller, subnormals included
//   X = fl(fl(P fl(acc F - delta)) (scale 2^eQ)) 2^eK, rounded by fl(X + q) - q with q = 1.5 2^20 max(2^e(X), 2^(e - 6))
//       where 2^e(X) is the power in X and 2^e the scale of the 32x32 tile
// A row with top = +inf has t = -inf: P = +0 and X = 0. All other steps, tiles with E < -100, and tiles whose largest
// |X| is below 2^-92, 2^100 or more, or 0 for want of bits, take the operations of the reference one by one (`slow_*`),
// from products that are made anew, and by the whole warpgroup, because that is what makes products.
#pragma once

#include "common/tokens.cuh"
#include "hopper/exp2.cuh"
#include "hopper/tiles.cuh"

struct BackwardParams {
  const uint8_t* q;      // (q_heads, max_tiles, 128 D), E4M3
  const uint8_t* k;      // (kv_heads, ...)
  const uint8_t* v;      // token blocks of 32
  const uint8_t* v1;     // token blocks of 1, for the diagonal tile; as v without one
  const uint8_t* dout;   // (q_heads, ...)
  const uint8_t* q_wide;     // (q_heads, max_tiles, 256 D), codes as bfloat16
  const uint8_t* k_wide;     // (kv_heads, ...)
  const uint8_t* dout_wide;  // (q_heads, ...), values
  const float* q_exponents;  // (q_heads, max_tiles, 128), Note [Folded exponents]
  const float* k_exponents;
  const uint8_t* v_scales;     // (kv_heads, max_tiles, 512), one byte per token in column 0
  const uint8_t* v1_scales;    // as v_scales
  const uint8_t* dout_scales;  // (q_heads, ...)
  const float* delta;          // (q_heads, max_tiles, 128)
  const float* top;
  Tokens first;   // dK of `backward_keys`, dQ of `backward_queries`
  Tokens second;  // dV of `backward_keys`
  uint8_t* q_columns;  // (q_heads, max_tiles, 2 halves, 1056): Note [Columns]
  uint8_t* k_columns;  // (kv_heads, max_tiles, 2 halves, V and V1, 544)
  float* scratch;  // (CTAs, 64, 256), for slow tiles
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
  float fast_exponent;  // largest eQ + eK of a fast step: |w| < 2^21; -inf if c or softmax_scale are unusual
  int32_t kv_heads;
  uint8_t* x;     // (heads of the launch, pairs, 32768), bfloat16: Note [Stored X]
  int64_t pairs;  // of a query head in `x`
  int32_t first_head;  // KV heads of this launch
  int32_t last_head;   // one past the last
};
static_assert(sizeof(BackwardParams) == PARAMS_BYTES, "BackwardParams must match structs.HOPPER_BACKWARD");

namespace backward {

using namespace hopper;

constexpr int D = HEAD_DIM;
constexpr int TILE = layout::TILE;
constexpr int STEP = 64;  // tokens of a step
constexpr int CONSUMERS = 256;
constexpr int THREADS = CONSUMERS + 128;
constexpr int PANELS = D / 64;
constexpr int TILE_BYTES = TILE * D, STEP_BYTES = STEP * D;
constexpr int STEP_PANEL = STEP * 128;              // bytes of 64 rows of a panel of a wide tile
constexpr int STEP_WIDE = PANELS * STEP_PANEL;
static_assert(D == 64 || D == 128, "the Hopper kernels take head_dim 64 and 128");

constexpr float EXPONENT_ORIGIN = MAGIC + 127.0f;  // of t: its low bits are those of a biased exponent
__device__ __forceinline__ float infinity() { return __uint_as_float(formats::EXPONENT); }
constexpr float LOWEST_E = -100.0f;

enum Flag : uint32_t { SLOW = 1, TINY = 2, DIAGONAL = 4, ENDS = 8 };

// ---- work ------------------------------------------------------------------------------------------------------

// The owner's tile, as warp 0 publishes it.
struct Record {
  int32_t valid;
  int32_t head;    // KV head of `backward_keys`, query head of `backward_queries`
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
// What a step needs of its 64 columns beside the operands is the same for every owner: `backward_columns` writes it once,
// and it is copied with the operands. Of each pair of columns, four numbers:
//   queries   score: EXPONENT_ORIGIN - m, c 2^eQ;  gradient: -delta, scale 2^eQ
//   keys      score: 2^eK, 2^e of V, once for V and once for V1
struct Summary {
  uint32_t flags[2];  // of each block of 32 columns
  float largest[2];   // exponent
  float factor[2];    // 2^e of the block: of dO, or of V
  float unused[2];
};

struct alignas(16) QueryColumns {
  float4 score[STEP / 2];
  float4 gradient[STEP / 2];
  Summary summary;
};
struct alignas(16) KeyColumns {
  float4 score[STEP / 2];
  Summary summary;
};
static_assert(sizeof(QueryColumns) == 1056 && sizeof(KeyColumns) == 544, "as in kernels/hopper_backward.py");

// What the fetching warp says of a step.
struct Step {
  int32_t tile;
  int32_t half;   // of the tile
  uint32_t bits;  // DIAGONAL: queries and keys of one tile, and causal; ENDS: the last step for the owner and a query head
};

// The numbers of a column.
__device__ __forceinline__ float2 numbers_of(const float4* pairs, int column) {
  const float* const at = reinterpret_cast<const float*>(pairs + column / 2) + column % 2;
  return make_float2(at[0], at[2]);
}

// Flags of an owner's 64 rows, and the largest exponent that columns may have beside them.
struct RowFlags {
  uint32_t flags;
  float largest;
  __device__ __forceinline__ RowFlags(const BackwardParams& p, const Summary& rows)
      : flags(rows.flags[0] | rows.flags[1]), largest(p.fast_exponent - fmaxf(rows.largest[0], rows.largest[1])) {}
};

// What is known of a step before its products are done: flags of rows and columns, whether their exponents together are
// unusual, and the bits of the step.
__device__ __forceinline__ uint32_t flags_of(const RowFlags& rows, const Summary& columns, const Step& step) {
  const uint32_t unusual = fmaxf(columns.largest[0], columns.largest[1]) <= rows.largest ? 0 : SLOW;
  return uniform(rows.flags | columns.flags[0] | columns.flags[1] | unusual | step.bits);
}

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

// Whether an exponent of Q or K, a byte of V, a byte of dO is usual: Note [Fast tiles]. False for NaN.
__device__ __forceinline__ bool check_exponent(float e) { return e >= -20.0f && e <= 2.0f; }
__device__ __forceinline__ bool check_v(uint32_t byte) { return byte == 0 || (byte >= 97 && byte <= 157); }
__device__ __forceinline__ bool check_dout(uint32_t byte) { return byte == 0 || (byte >= 37 && byte <= 157); }
__device__ __forceinline__ bool check_top(float top) { return fabsf(top) < 0x1p20f || top == infinity(); }

// E4M3 of y over the power 2^e, times 2^e, given 2^(e - 6) as `least`; NaN for what is not finite.
__device__ __forceinline__ float round_scaled(float x, float least) {
  const float power = fmaxf(__uint_as_float(__float_as_uint(x) & formats::EXPONENT), least);
  const float up = __fmaf_rn(power, 0x1.8p20f, x);
  return __fmaf_rn(power, -0x1.8p20f, up);
}

// P 2^(8 - E), not rounded, of w = a c, given origin = EXPONENT_ORIGIN - m and shift = 8 - (E + EXPONENT_ORIGIN) as integers.
__device__ __forceinline__ float probability(float a, float c, float origin, int shift) {
  const float t = __fmaf_rd(a, c, origin);
  const float f = ptx::fma_rn_sat_f32(a, c, __fsub_rn(origin, t));
  const float p = exp2_mantissa(f);
  return __uint_as_float(__float_as_uint(p) + (uint32_t(max(int(__float_as_uint(t)) + shift, -20)) << 23));
}

// 2^(e - 6) of the RCEIL scale 2^e of a tile with largest magnitude `amax`, which is 0 or normal.
__device__ __forceinline__ float least_gradient(uint32_t amax) {
  const uint32_t y = __float_as_uint(__fmul_rn(__uint_as_float(amax), __uint_as_float(0x3B124925u) /* fl(1/448) */));
  return __uint_as_float(max((y + 0x007FFFFFu) & formats::EXPONENT, 7u << 23) - (6u << 23));
}

// ---- maxima of 32x32 tiles -------------------------------------------------------------------------------------

// A warp holds 16 rows: two of them share a tile. Each sends the largest value of its half and goes on; it receives what
// the four warps of its warpgroup have sent when it has work that needs it. No step sends one call twice, and no warp
// sends a call again before the others have received it: in between it receives another, which they send after that.
enum Call : int { E_FIRST, E_SECOND, AMAX_FIRST, AMAX_SECOND };

// `wait` as one instruction to the compiler, which must not see a branch where products are under way.
__device__ __forceinline__ void wait_in_place(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred p;\nTRY:\n\t"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t@!p bra TRY;\n\t}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

struct Exchange {
  uint32_t values[4][CONSUMERS / 32];  // by call and warp
  uint64_t sent[4][CONSUMERS / 128];   // by call and warpgroup
  uint4 slots[2][CONSUMERS / 64];      // of slow tiles, by call: no two in a row may be the same

  __device__ __forceinline__ void init() {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < CONSUMERS / 128; ++j) ptx::mbarrier_init(ptx::shared_address(&sent[i][j]), 4);
    }
  }
  __device__ __forceinline__ void send(int call, int warp, uint32_t value) {
    const uint32_t own = ptx::redux_max_u32(value);
    if (ptx::thread_index() % 32 == 0) {
      values[call][warp] = own;
      ptx::mbarrier_arrive(ptx::shared_address(&sent[call][warp / 4]));
    }
  }
  // Of the tile that the warp shares, and of the tile of the other two warps.
  __device__ __forceinline__ uint2 receive(int call, int warp, uint32_t phase) const {
    wait_in_place(ptx::shared_address(&sent[call][warp / 4]), phase);
    const uint2* const pairs = reinterpret_cast<const uint2*>(values[call]);
    const uint2 x = pairs[warp / 2], y = pairs[warp / 2 ^ 1];
    return make_uint2(max(x.x, x.y), max(y.x, y.y));
  }

  // Both at once and waiting, for two blocks of 32 columns: of the warp's tiles in x and y; in z and w of those of the
  // other two warps.
  __device__ __forceinline__ uint4 largest(uint32_t a, uint32_t b, int call) {
    const uint32_t thread = ptx::thread_index(), pair = thread / 64;
    const uint2 own = make_uint2(ptx::redux_max_u32(a), ptx::redux_max_u32(b));
    if (thread % 32 == 0) reinterpret_cast<uint2*>(slots[call])[thread / 32] = own;
    ptx::barrier_sync(1 + thread / 128, 128);
    const uint4 x = slots[call][pair], y = slots[call][pair ^ 1];
    return make_uint4(max(x.x, x.z), max(x.y, x.w), max(y.x, y.z), max(y.y, y.w));
  }
};

// E + EXPONENT_ORIGIN of a tile as an integer, from the largest t of its entries; 0, where no entry is visible, is E = 0.
__device__ __forceinline__ uint32_t known_top(uint32_t t) { return t == 0 ? __float_as_uint(EXPONENT_ORIGIN) : t; }

// Whether one of the tops of four tiles is low; 0, of a tile without a visible entry, is not.
__device__ __forceinline__ bool is_low(uint2 a, uint2 b) {
  const uint32_t least = min(min(a.x - 1, a.y - 1), min(b.x - 1, b.y - 1));
  return least < __float_as_uint(EXPONENT_ORIGIN + LOWEST_E) - 1;
}

// Whether one of the largest |X| of four tiles leaves Note [Fast tiles].
__device__ __forceinline__ bool is_unusual(uint2 a, uint2 b, bool tiny) {
  constexpr uint32_t LOW = (127u - 92u) << 23, HIGH = (127u + 100u) << 23;
  if (max(max(a.x - LOW, a.y - LOW), max(b.x - LOW, b.y - LOW)) < HIGH - LOW) return false;
  const auto usual = [&](uint32_t x) { return x == 0 ? !tiny : x - LOW < HIGH - LOW; };
  return !(usual(a.x) && usual(a.y) && usual(b.x) && usual(b.y));
}

// ---- operands --------------------------------------------------------------------------------------------------

// The 64x64 accumulator as A operand of four steps of 16 columns.
__device__ __forceinline__ void pack(uint32_t (&a)[16], const float (&x)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) a[i] = ptx::cvt_rn_bf16x2_f32(x[2 * i + 1], x[2 * i]);
}

// The same from E4M3 codes of P, given 2^(E - 8 + 120) in both halves of `scale`.
__device__ __forceinline__ uint32_t pack_codes(float low, float high, uint32_t scale) {
  const uint32_t codes = ptx::cvt_rn_satfinite_e4m3x2_f32(high, low);
  return ptx::mul_rn_bf16x2(ptx::prmt(codes, 0, 0x4140) << 4, scale);
}
__device__ __forceinline__ uint32_t scale_of_codes(uint32_t top) {
  const uint32_t half = (top + 112 & 0xFF) << 7;
  return half | half << 16;
}

__device__ __forceinline__ float unpack(const uint32_t (&a)[16], int i) {
  return __uint_as_float(i % 2 == 0 ? a[i / 2] << 16 : a[i / 2] & 0xFFFF0000u);
}

// Note [Moving descriptors]
// ~~~~~~~~~~~~~~~~~~~~~~~~~
// Products name their operands by descriptors. The one of a stage is that of stage 0, which does not change, and its
// distance, in units of 16 bytes: an addition per product.

// d = A B^T over channels, both E4M3; a at row 0 of 64, b likewise, `distance` bytes further.
__device__ __forceinline__ void multiply_channels(float (&d)[32], uint32_t a, uint32_t b, uint32_t distance) {
  const uint64_t da = describe_k_major<D>(a), db = describe_k_major<D>(b) + distance / 16;
#pragma unroll
  for (int k = 0; k < D / 32; ++k) ptx::wgmma_e4m3_ss<64>(d, da + 2 * k, db + 2 * k, k != 0);
}

// The 64 rows from `row` on of a tile in shared memory as A operand of all steps of 32 channels.
__device__ __forceinline__ void load_rows(uint32_t (&a)[D / 8], const uint8_t* tile, int row) {
#pragma unroll
  for (int i = 0; i < D / 8; ++i) {
    const int byte = 32 * (i / 4) + 16 * (i / 2 % 2) + 4 * (ptx::thread_index() % 4);
    a[i] = *reinterpret_cast<const uint32_t*>(tile + layout::payload_offset<D>(row + 8 * (i % 2), byte));
  }
}

// d = A B^T over channels, a as load_rows made it.
__device__ __forceinline__ void multiply_channels(float (&d)[32], const uint32_t (&a)[D / 8], uint32_t b, uint32_t distance) {
  const uint64_t db = describe_k_major<D>(b) + distance / 16;
#pragma unroll
  for (int k = 0; k < D / 32; ++k) ptx::wgmma_e4m3_rs_64(d, a + 4 * k, db + 2 * k, k != 0);
}

// d += A B over 64 tokens; b: 64 rows of a wide tile, `distance` bytes further.
__device__ __forceinline__ void multiply_tokens(float (&d)[D / 2], const uint32_t (&a)[16], uint32_t b, uint32_t distance) {
  const uint64_t db = describe_mn_major(b, STEP_PANEL) + distance / 16;
#pragma unroll
  for (int k = 0; k < 4; ++k) ptx::wgmma_bf16_rs<D>(d, a + 4 * k, db + k * MN_STEP, 1);
}

// The compiler must not move uses of these registers past this point: it does not know when a wgmma is done with them.
template <class T, int N>
__device__ __forceinline__ void keep_all(T (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) ptx::keep(x[i]);
}

// Whatever these registers hold is of no use: the compiler takes a wgmma that starts from zero for one that adds.
template <int N>
__device__ __forceinline__ void forget_all(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(x[i]));
}

// Start to copy 64 rows of a tile.
__device__ __forceinline__ void copy_step(uint32_t to, const uint8_t* tile, int half, uint32_t barrier) {
  ptx::cp_async_bulk_shared_global(to, tile + half * STEP_BYTES, STEP_BYTES, barrier);
}

// The same of a wide tile.
__device__ __forceinline__ void copy_step_wide(uint32_t to, const uint8_t* tile, int half, uint32_t barrier) {
#pragma unroll
  for (int i = 0; i < PANELS; ++i) {
    ptx::cp_async_bulk_shared_global(to + i * STEP_PANEL, tile + i * PANEL_BYTES + half * STEP_PANEL, STEP_PANEL, barrier);
  }
}

}  // namespace backward
