// dQ on Hopper from stored tiles of X: a product of its own.
//
// Note [Stored X]
// ~~~~~~~~~~~~~~~
// dQ sums over keys what dK sums over queries, so a CTA that owns keys cannot keep it, and the sum is one chain of
// products in ascending order of keys: partial sums cannot be added later. `backward_keys` therefore stores each X^T that
// it multiplies, and this kernel multiplies it with the keys. The alternative, a kernel whose CTAs own queries and make
// S, dP, P and X again, takes longer than writing and reading 12 bits, or 16, per query and key.
//
// Pairs of a query tile and a key tile are numbered by layout::pair_of, head after head of the launch. A pair has 24 KB,
// or 32: half of them for each 64 queries, of which every 16 keys are a piece, Note [Packed X]. Counted in *blocks* of 64
// tokens, what is written is block (query, key) of every pair of blocks that have tokens and, if causal, the key not after
// the query.
//
// A CTA takes an item of the forward's list: two adjacent query tiles of a head, a consumer warpgroup for each of their
// four blocks, which share the tiles of K: X streams from memory once, and K comes from L2 for every four blocks. It comes
// as E4M3, and three more warps make bfloat16 of it: half of the bytes, and no copy of K in memory. Unscaled, it is wide.
#include "common/pairs.cuh"
#include "hopper/backward_rows.cuh"
#include "hopper/backward_stored.cuh"
#include "hopper/backward_wide.cuh"

using namespace backward;

constexpr int BLOCKS = 4;  // of the queries of an item
constexpr int QUERY_WARPS = 4 * BLOCKS, KEY_WARPS = 3, ALL_THREADS = 32 * (QUERY_WARPS + (E4M3 ? KEY_WARPS : 0) + 1);
constexpr int STAGES = D == 128 ? 4 : PACKED ? 6 : 5;
constexpr int AHEAD = 8;  // steps before its end in which an item's successor is taken

struct alignas(1024) Stage {
  uint8_t x[BLOCKS][BLOCK_BYTES];
  uint8_t wide[STEP_WIDE];  // of the keys
  uint8_t k[E4M3 ? STEP_BYTES : 1];
};

// The item of a stage, as its consumers see it.
struct Item {
  int32_t steps;  // blocks of keys that some of the queries see; 0: no more work
  int32_t first;  // the first of the item's blocks of queries, in the document
  int32_t head;
  int32_t start;  // packed index of the first query
  int32_t rows;   // queries
};

struct Shared {
  Stage stage[STAGES];
  alignas(16) float exponents[STAGES][STEP];  // of the keys
  Item items[STAGES];
  uint64_t full[STAGES], widened[STAGES], empty[STAGES];
};
static_assert(sizeof(Shared) <= 227 * 1024, "the shared memory of one CTA");
extern "C" __constant__ const int backward_dq_shared_bytes = sizeof(Shared);

// How many blocks of keys the queries of a block see, given how many the document has.
__device__ __forceinline__ int count_seen(bool causal, int block, int blocks) {
  return block >= blocks ? 0 : causal ? block + 1 : blocks;
}

// ---- fetching --------------------------------------------------------------------------------------------------

// One warp. An item is taken shortly before the last of the one before is fetched: early enough to be known then, and not
// so early that others run out of items first.
__device__ __forceinline__ void fetch(const BackwardParams& p, Shared& s) {
  const int lane = threadIdx.x % 32;
  const bool causal = p.causal;
  const int items = p.status[layout::NUM_FORWARD];
  const uint64_t once = ptx::createpolicy_evict_first();
  Ring<STAGES> ring;
  const auto take = [&]() {
    int ticket = 0;
    if (lane == 0) ticket = atomicAdd(p.ticket, 1);
    return ticket;
  };
  const auto find = [&](int ticket) {
    ticket = ptx::shfl_idx(ticket, 0);
    return ticket < items ? p.items[ticket] : make_int4(0, -1, 0, 0);
  };
  int4 next = find(take());
#pragma unroll 1
  while (true) {
    const int4 found = next;
    const bool valid = found.y >= 0;
    const int kv_head = found.y / p.group;
    if (valid && (kv_head < p.first_head || kv_head >= p.last_head)) {
      next = find(take());
      continue;
    }

    Item item{};
    int base = 0, count = 0, blocks = 0;
    int64_t first_pair = 0;
    if (valid) {
      base = p.tile_offsets[found.x], count = p.tile_offsets[found.x + 1] - base;
      const layout::Tile tile = p.tiles[base + found.z];
      const int last = p.tiles[base + count - 1].rows;
      blocks = 2 * count - (last <= STEP);
      item.first = 2 * found.z;
      item.steps = causal ? min(item.first + BLOCKS, blocks) : blocks;
      item.head = found.y;
      item.start = tile.start;
      first_pair = layout::first_pair(causal, p.longest, found.x, tile.start - found.z * TILE);
      item.rows = found.z + 1 < count ? TILE + (found.z + 2 < count ? TILE : last) : tile.rows;
    }
    const uint8_t* const x = p.x + (found.y - p.first_head * p.group) * p.pairs * 4 * BLOCK_BYTES;
    const int64_t slot = kv_head * p.max_tiles + base;
    const int steps = max(item.steps, 1);
    int ticket = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      if (valid && step == max(steps - AHEAD, 0)) ticket = take();
      if (valid && step == steps - 1) next = find(ticket);
      wait(ptx::shared_address(&s.empty[ring.stage]), ring.phase ^ 1);
      if (lane == 0) {
        Stage& stage = s.stage[ring.stage];
        const uint32_t barrier = ptx::shared_address(&s.full[ring.stage]);
        s.items[ring.stage] = item;
        int needed = 0;
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) needed += step < count_seen(causal, item.first + b, blocks);
        constexpr uint32_t OF_KEYS = STEP_BYTES + (E4M3 ? sizeof(s.exponents[0]) : 0);
        ptx::mbarrier_arrive_expect_tx(barrier, needed * BLOCK_BYTES + (valid ? OF_KEYS : 0));
        if (valid) {
          copy_step<ROW_BYTES>(ptx::shared_address(E4M3 ? stage.k : stage.wide),
                               p.k + (slot + step / 2) * TILE_BYTES, step % 2, barrier);
          if constexpr (E4M3) {
            ptx::cp_async_bulk_shared_global(ptx::shared_address(s.exponents[ring.stage]),
                                             p.k_exponents + slot * TILE + step * STEP, sizeof(s.exponents[0]), barrier);
          }
#pragma unroll
          for (int b = 0; b < BLOCKS; ++b) {
            const int block = item.first + b;
            if (step >= count_seen(causal, block, blocks)) continue;
            const int64_t pair = layout::pair_of(causal, first_pair, count, block / 2, step / 2);
            ptx::cp_async_bulk_shared_global(ptx::shared_address(stage.x[b]),
                                             x + (4 * pair + 2 * (block % 2) + step % 2) * BLOCK_BYTES, BLOCK_BYTES, barrier,
                                             once);
          }
        }
      }
      ring.advance();
    }
    if (!valid) break;
  }
  if (lane == 0 && atomicAdd(p.ticket + 1, 1) == int(gridDim.x) - 1) p.ticket[0] = p.ticket[1] = 0;
}

// ---- keys to bfloat16 ------------------------------------------------------------------------------------------

// 64 keys of a stage, by KEY_WARPS warps. A thread takes pieces of 16 codes; quarters of a warp take four pieces of two
// rows, which lie in different banks of the wide tile. Three pieces are loaded at once.
template <bool FAST>
__device__ __forceinline__ void widen_keys(Stage& stage, const float* exponents) {
  constexpr int PIECES = PANELS * STEP * 4, EACH = (PIECES + 32 * KEY_WARPS - 1) / (32 * KEY_WARPS), AT_ONCE = 3;
  static_assert(EACH % AT_ONCE == 0, "pieces of a thread");
  const int thread = threadIdx.x - 32 * QUERY_WARPS;
  const auto exists = [&](int i) { return i + 1 < EACH || thread + 32 * KEY_WARPS * i < PIECES; };
  const auto row = [&](int i) { return (thread + 32 * KEY_WARPS * i) / 4 % STEP; };
  const auto piece = [&](int i) { return (thread + 32 * KEY_WARPS * i) / (4 * STEP) * 4 + thread % 4; };
#pragma unroll
  for (int first = 0; first < EACH; first += AT_ONCE) {
    uint4 codes[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const uint8_t* const from = stage.k + layout::payload_offset<D>(row(first + i), 16 * piece(first + i));
      if (exists(first + i)) codes[i] = *reinterpret_cast<const uint4*>(from);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      if (!exists(first + i)) break;
      const int r = row(first + i), p = piece(first + i);
      const uint32_t power = pair_exp2<FAST>(exponents[r]);  // 0 for a lost token
      uint8_t* const to = stage.wide + p / 4 * STEP_PANEL + r * 128;
      *reinterpret_cast<uint4*>(to + 16 * (2 * (p % 4) ^ r % 8)) = widen_piece<FAST>(codes[i].x, codes[i].y, power);
      *reinterpret_cast<uint4*>(to + 16 * (2 * (p % 4) + 1 ^ r % 8)) = widen_piece<FAST>(codes[i].z, codes[i].w, power);
    }
  }
}

__device__ __forceinline__ void widen(Shared& s) {
  const int lane = threadIdx.x % 32;
  Ring<STAGES> ring;
#pragma unroll 1
  while (true) {
    wait(ptx::shared_address(&s.full[ring.stage]), ring.phase);
    if (uniform(s.items[ring.stage].steps) == 0) return;
    const float* const exponents = s.exponents[ring.stage];
    if (ptx::vote_any(!widens_fast(exponents[lane]) || !widens_fast(exponents[lane + 32]))) {
      widen_keys<false>(s.stage[ring.stage], exponents);
    } else {
      widen_keys<true>(s.stage[ring.stage], exponents);
    }
    ptx::fence_proxy_async();
    ptx::bar_warp_sync();
    if (ptx::arrives(lane)) ptx::mbarrier_arrive(ptx::shared_address(&s.widened[ring.stage]));
    ring.advance();
  }
}

// ---- consuming -------------------------------------------------------------------------------------------------

__device__ __forceinline__ void consume(const BackwardParams& p, Shared& s) {
  const int warp = uniform(threadIdx.x / 32), block = warp / 4, lane = threadIdx.x % 32;
  const uint32_t x = ptx::shared_address(s.stage[0].x[block]);
  const PackedPlaces places(x, warp % 4);
  const uint64_t a = describe_mn_major(x, 0);
  const uint64_t b = describe_mn_major(ptx::shared_address(s.stage[0].wide), STEP_PANEL);
  Ring<STAGES> ring;
  float dq[D / 2];
  uint32_t operands[8];  // X of 32 keys
  const auto wait_full = [&]() { wait(ptx::shared_address(&s.full[ring.stage]), ring.phase); };
  const auto release = [&](int stage) {
    ptx::bar_warp_sync();
    if (ptx::arrives(lane)) ptx::mbarrier_arrive(ptx::shared_address(&s.empty[stage]));
  };
#pragma unroll 1
  while (true) {
    wait_full();
    const Item item = s.items[ring.stage];
    const int steps = uniform(item.steps);
    if (steps == 0) return;
    const int blocks = item.first + (item.rows + STEP - 1) / STEP;  // no block of queries after the item's matters here
    const int seen = uniform(item.first + block >= blocks ? 0 : p.causal ? item.first + block + 1 : steps);
#pragma unroll
    for (int i = 0; i < D / 2; ++i) {
      dq[i] = 0.0f;
      ptx::keep(dq[i]);  // zeros before the first wgmma, and not where the loop begins
    }
    int before = -1;  // the stage that is free once the product before is done
#pragma unroll 1
    for (int step = 0; step < seen; ++step) {
      wait_full();
      if constexpr (E4M3) wait(ptx::shared_address(&s.widened[ring.stage]), ring.phase);
      const uint32_t distance = ring.stage * (sizeof(Stage) / 16);
      if constexpr (PACKED) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of the keys: registers do not suffice for all
          ptx::wgmma_wait_group<0>();  // products of other warpgroups run meanwhile
          keep_all(operands);
          if (half == 0 && before >= 0) release(before);
          load_packed(operands, places, 16 * distance + half * 2 * PIECE_BYTES);
          ptx::wgmma_fence();
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            ptx::wgmma_bf16_rs<D>(dq, operands + 4 * k, b + distance + (2 * half + k) * MN_STEP, 1);
          }
          ptx::wgmma_commit_group();
        }
      } else {
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEP / 16; ++k) {
          ptx::wgmma_bf16_ss<D, 1>(dq, a + distance + k * MN_STEP, b + distance + k * MN_STEP, 1);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        if (before >= 0) release(before);
      }
      before = ring.stage;
      ring.advance();
    }
    ptx::wgmma_wait_group<0>();
    if (before >= 0) release(before);
#pragma unroll 1
    for (int step = seen; step < steps; ++step) {  // of the others
      wait_full();
      release(ring.stage);
      ring.advance();
    }
    if (seen == 0) continue;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) {
      ptx::keep(dq[i]);
      dq[i] = __fmul_rn(p.softmax_scale, dq[i]);
    }
    store_rows(dq, p.first, item.head, item.start, 16 * warp + lane / 4, item.rows);
  }
}

// Registers of a thread with accumulators and X, which the others give.
constexpr int ENTRY_REGISTERS = 65536 / ALL_THREADS / 8 * 8, CONSUMER_REGISTERS = 104, OTHER_REGISTERS = 64;
static_assert(!PACKED || BLOCKS * CONSUMER_REGISTERS + OTHER_REGISTERS <= (BLOCKS + 1) * ENTRY_REGISTERS,
              "a CTA's warpgroups share the registers that it was launched with");

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) backward_dq(const __grid_constant__ BackwardParams p) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    init_barriers(s.full, 1);
    init_barriers(s.widened, KEY_WARPS * ptx::WARP_ARRIVALS);
    init_barriers(s.empty, QUERY_WARPS * ptx::WARP_ARRIVALS);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  const int warp = uniform(threadIdx.x / 32);
  if (warp < QUERY_WARPS) {
    if constexpr (PACKED) ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, s);
  } else {
    if constexpr (PACKED) ptx::setmaxnreg_dec<OTHER_REGISTERS>();
    if (E4M3 && warp < QUERY_WARPS + KEY_WARPS) {
      widen(s);
    } else {
      fetch(p, s);
    }
  }
}
