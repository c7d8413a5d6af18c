// dQ on Blackwell from stored tiles of X: a product of its own.
//
// Note [Stored X]
// ~~~~~~~~~~~~~~~
// dQ sums over keys what dK sums over queries, so a CTA that owns keys cannot keep it. Its sum is one chain of products
// in ascending order of keys, as the contract says: FP32 partial sums cannot be added later, and handing the
// accumulator from CTA to CTA costs 2 x 64 KB of traffic per tile. There are two ways that need no order between CTAs:
// compute S, dP, P and X again for queries (OWNER queries of backward.cu), or keep X, which is E4M3: 16 KB and 16 scale
// bytes per tile. Kept, it is written once in the order in which the tensor core reads shared memory, rows are keys,
// and read once here as an MN-major A: dQ += X K. The host keeps as many heads at a time as fit its memory.
//
// A CTA takes an item of the forward's list: two adjacent query tiles of a head, which share the tiles of K.

// layout.cuh asks for these; nothing here depends on them.
#define RECIPE_IS_MXFP8 1
#define STRICT 0
#define HOOKS 0

#include "blackwell/backward_params.cuh"
#include "blackwell/backward_store.cuh"
#include "blackwell/pipeline.cuh"

namespace blackwell::dq {

using backward::BackwardParams;
using backward::pair_of;
using layout::TILE;

// ---- roles: warps 0-3 store, 4 loads, 5 multiplies, 6 makes scale tables; 7 only fills the warpgroup ------------------

constexpr int THREADS = 256, STORE_WARPS = 4, LOAD_WARP = 4, MULTIPLY_WARP = 5, TABLE_WARP = 6;
constexpr int K_STAGES = 3, X_STAGES = 4, WORK_STAGES = 2, X_TILE = TILE * TILE, X_SCALES = 16;

// ---- tensor memory: two sums, a scale table for each stage of X, the constant table -----------------------------------

constexpr uint32_t COLUMNS = 512, SUM_COLUMN = 0, TABLE_COLUMN = QUERY_TILES * D, ONE_COLUMN = TABLE_COLUMN + 4 * X_STAGES;
static_assert(ONE_COLUMN + 4 <= COLUMNS, "two sums and the scale tables must fit the 512 columns");

constexpr uint32_t A_MN_MAJOR = 1u << 15;
constexpr uint32_t INSTRUCTION = shape(D) | E8M0_SCALES | A_MN_MAJOR | B_MN_MAJOR;

struct alignas(16) Work {
  int32_t tiles;  // query tiles; 0: no more work
  int32_t head;
  int32_t first;  // first query tile, within the document
  int32_t base;   // the document's first tile, in the tile table
  int32_t count;  // its tiles
  int32_t keys[QUERY_TILES];  // key tiles that each query tile sees; the second sees as many or one more
  int32_t unused;
  int64_t pair;  // the number of the document's first pair of tiles
  int64_t unused_too;
};

struct alignas(1024) Shared {
  uint8_t k[K_STAGES][VALUE_TILE];
  uint8_t x[X_STAGES][X_TILE];
  alignas(128) uint8_t tables[X_STAGES][SCALES];
  uint8_t one[SCALES];
  Work work[WORK_STAGES];
  uint64_t work_full[WORK_STAGES], work_empty[WORK_STAGES];
  uint64_t k_full[K_STAGES], k_empty[K_STAGES];
  uint64_t x_full[X_STAGES], table_full[X_STAGES], x_empty[X_STAGES];
  uint64_t sums_full, sums_read;
  uint32_t tensor_memory;
};
static_assert(sizeof(Shared) <= 227 * 1024, "a CTA has 227 KB of shared memory");

__device__ __forceinline__ Work describe_item(const BackwardParams& p, const int4& item) {
  Work work = {};
  const int kv_head = item.y / p.group;
  if (kv_head < p.first_head || kv_head >= p.last_head) return work;
  work.base = p.tile_offsets[item.x];
  work.count = p.tile_offsets[item.x + 1] - work.base;
  work.head = item.y;
  work.first = item.z;
  work.tiles = min(work.count - item.z, QUERY_TILES);
  work.pair = backward::first_pair(p.causal, p.longest, item.x, p.tiles[work.base].start);
  work.keys[0] = p.causal ? item.z + 1 : work.count;
  work.keys[1] = work.tiles < 2 ? 0 : p.causal ? item.z + 2 : work.count;
  return work;
}

__device__ __forceinline__ int64_t pair_slot(const BackwardParams& p, const Work& work, int i, int j) {
  const int64_t head = work.head - int64_t(p.first_head) * p.group;
  return head * p.pairs + pair_of(p.causal, work.pair, work.count, work.first + i, j);
}

__device__ __forceinline__ void fetch(void* to, const void* from, uint32_t bytes, const uint64_t& barrier) {
  ptx::mbarrier_arrive_expect_tx(at(&barrier), bytes);
  ptx::cp_async_bulk_shared_global(at(to), from, bytes, at(&barrier));
}

// Every role walks items, key tiles, and the query tiles that see them, in the same order.
template <class KeyTile, class Pair>
__device__ __forceinline__ void walk(const Work& work, KeyTile key_tile, Pair pair) {
  const int count = max(work.keys[0], work.keys[1]);
#pragma unroll 1
  for (int j = 0; j < count; ++j) {
    key_tile(j, j + 1 == count, false);
#pragma unroll 1
    for (int i = 0; i < work.tiles; ++i) {
      if (j < (i == 0 ? work.keys[0] : work.keys[1])) pair(i, j);
    }
    key_tile(j, j + 1 == count, true);
  }
}

__device__ __forceinline__ Work next_work(Shared& shared, const Ring<WORK_STAGES>& ring) {
  wait(shared.work_full[ring.stage], ring.phase);
  return shared.work[ring.stage];
}

__device__ __forceinline__ void load(const BackwardParams& p, Shared& shared) {
  Ring<WORK_STAGES> works;
  Ring<K_STAGES> keys;
  Ring<X_STAGES> xs;
  const int items = p.status[p.num_items];
  for (bool more = true; more;) {
    const int taken = atomicAdd(p.ticket, 1);
    more = taken < items;
    Work work = {};
    if (more) work = describe_item(p, p.items[taken]);
    if (more && work.tiles == 0) continue;
    wait(shared.work_empty[works.stage], works.phase ^ 1);
    shared.work[works.stage] = work;
    ptx::mbarrier_arrive(at(&shared.work_full[works.stage]));
    works.advance();
    if (!more) break;
    const int64_t key_slot = int64_t(work.head / p.group) * p.max_tiles + work.base;
    walk(
        work,
        [&](int j, bool, bool after) {
          if (after) return;
          wait(shared.k_empty[keys.stage], keys.phase ^ 1);
          fetch(shared.k[keys.stage], p.k_tokens + (key_slot + j) * VALUE_TILE, VALUE_TILE, shared.k_full[keys.stage]);
          keys.advance();
        },
        [&](int i, int j) {
          wait(shared.x_empty[xs.stage], xs.phase ^ 1);
          fetch(shared.x[xs.stage], p.x + pair_slot(p, work, i, j) * X_TILE, X_TILE, shared.x_full[xs.stage]);
          xs.advance();
        });
  }
  if (atomicAdd(p.ticket + 1, 1) == int(gridDim.x) - 1) p.ticket[0] = p.ticket[1] = 0;
}

// Scale tables: 32 times the same line, four bytes of key blocks for each query block.
__device__ __forceinline__ void make_tables(const BackwardParams& p, Shared& shared) {
  const int lane = threadIdx.x % 32;
  Ring<WORK_STAGES> works;
  Ring<X_STAGES> xs;
  for (;; works.advance()) {
    const Work work = next_work(shared, works);
    arrive_warp(shared.work_empty[works.stage]);
    if (work.tiles == 0) break;
    walk(
        work, [](int, bool, bool) {},
        [&](int i, int j) {
          const uint4 of_keys = ptx::ld_global_nc_v4(p.x_scales + pair_slot(p, work, i, j) * X_SCALES);
          uint32_t of_queries[layout::BLOCKS];
#pragma unroll
          for (int b = 0; b < layout::BLOCKS; ++b) {
            const uint32_t which = b | (4 + b) << 4;
            of_queries[b] = ptx::prmt(ptx::prmt(of_keys.x, of_keys.y, which), ptx::prmt(of_keys.z, of_keys.w, which), 0x5410);
          }
          wait(shared.x_empty[xs.stage], xs.phase ^ 1);
          ptx::st_shared_v4(at(shared.tables[xs.stage]) + 16 * lane,
                            make_uint4(of_queries[0], of_queries[1], of_queries[2], of_queries[3]));
          ptx::fence_proxy_async();
          arrive_warp(shared.table_full[xs.stage]);
          xs.advance();
        });
  }
}

__device__ __forceinline__ void copy_table(uint32_t column, const uint8_t* from) {
  ptx::tcgen05_cp_32x128b_warpx4(column, describe_scales(at(from)));
}

// Nothing here relies on an order that PTX does not promise: a scale table has its columns to itself until the product
// that reads it has been waited for.
__device__ __forceinline__ void multiply(Shared& shared, uint32_t tensor) {
  Ring<WORK_STAGES> works;
  Ring<K_STAGES> keys;
  Ring<X_STAGES> xs;
  uint32_t items = 0;
  for (;; works.advance(), ++items) {
    const Work work = next_work(shared, works);
    ptx::mbarrier_arrive(at(&shared.work_empty[works.stage]));
    if (work.tiles == 0) break;
    wait(shared.sums_read, items & 1 ^ 1);
    if (items == 0) copy_table(tensor + ONE_COLUMN, shared.one);  // not before: a CTA without work has nothing under way
    walk(
        work,
        [&](int, bool last, bool after) {
          if (!after) {
            wait(shared.k_full[keys.stage], keys.phase);
          } else {
            ptx::tcgen05_commit(at(&shared.k_empty[keys.stage]));
            if (last) ptx::tcgen05_commit(at(&shared.sums_full));
            keys.advance();
          }
        },
        [&](int i, int j) {
          wait(shared.x_full[xs.stage], xs.phase);
          wait(shared.table_full[xs.stage], xs.phase);
          ptx::tcgen05_fence_after_thread_sync();
          const uint32_t table = tensor + TABLE_COLUMN + 4 * xs.stage, sum = tensor + SUM_COLUMN + i * D;
          copy_table(table, shared.tables[xs.stage]);
          const uint64_t a = describe_operand<TILE>(at(shared.x[xs.stage])), b = describe_operand<D>(at(shared.k[keys.stage]));
#pragma unroll
          for (int step = 0; step < VALUE_STEPS; ++step) {
            ptx::tcgen05_mma_mxf8f6f4_ss(sum, a + (step * STEP_BYTES * TILE >> 4), b + (step * STEP_BYTES * D >> 4),
                                         INSTRUCTION | scale_ids(step), table, tensor + ONE_COLUMN, j > 0 || step > 0);
          }
          ptx::tcgen05_commit(at(&shared.x_empty[xs.stage]));
          xs.advance();
        });
  }
}

// A thread takes a row: undoes its exponent, rounds, stores.
__device__ __forceinline__ void store(const BackwardParams& p, Shared& shared, uint32_t tensor) {
  const int row = threadIdx.x, size = p.element == 2 ? 4 : 2;
  Ring<WORK_STAGES> works;
  uint32_t items = 0;
  for (;; works.advance(), ++items) {
    const Work work = next_work(shared, works);
    arrive_warp(shared.work_empty[works.stage]);
    if (work.tiles == 0) break;
    wait(shared.sums_full, items & 1);
    ptx::tcgen05_fence_after_thread_sync();
#pragma unroll 1
    for (int i = 0; i < work.tiles; ++i) {
      const int index = work.base + work.first + i;
      const layout::Tile tile = p.tiles[index];
      const float undo = backward::power_of(-p.q_exponents[(work.head * p.max_tiles + index) * TILE + row]);
      uint8_t* const to = p.first.data + (int64_t(tile.start) + row) * p.first.token_stride + work.head * p.first.head_stride;
#pragma unroll 1
      for (int c = 0; c < D; c += 16) {
        uint32_t words[16];
        ptx::tcgen05_ld_x16(words, tensor + SUM_COLUMN + i * D + c);
        ptx::tcgen05_wait_ld();
        float x[16];
#pragma unroll
        for (int k = 0; k < 16; ++k) x[k] = __fmul_rn(__uint_as_float(words[k]), undo);
        if (row < tile.rows) backward::store_part(to + c * size, x, p.element);
      }
    }
    arrive_warp_tensor(shared.sums_read);
  }
}

}  // namespace blackwell::dq

using namespace blackwell;

extern "C" __constant__ const int attention_dq_shared_bytes = sizeof(dq::Shared);

__device__ __forceinline__ void init(uint64_t& barrier, uint32_t arrivals) { ptx::mbarrier_init(at(&barrier), arrivals); }

extern "C" __global__ void __launch_bounds__(dq::THREADS, 1)
    attention_dq(const __grid_constant__ backward::BackwardParams p) {
  extern __shared__ __align__(1024) uint8_t memory[];
  dq::Shared& shared = *reinterpret_cast<dq::Shared*>(memory);
  const int warp = ptx::shfl_idx(threadIdx.x / 32, 0);
  if (warp == dq::LOAD_WARP && ptx::elect_sync()) {
    for (int i = 0; i < dq::WORK_STAGES; ++i) {
      init(shared.work_full[i], 1);
      init(shared.work_empty[i], 1 + 1 + dq::STORE_WARPS);
    }
    for (int i = 0; i < dq::K_STAGES; ++i) {
      init(shared.k_full[i], 1);
      init(shared.k_empty[i], 1);
    }
    for (int i = 0; i < dq::X_STAGES; ++i) {
      init(shared.x_full[i], 1);
      init(shared.table_full[i], 1);
      init(shared.x_empty[i], 1);
    }
    init(shared.sums_full, 1);
    init(shared.sums_read, dq::STORE_WARPS);
    ptx::fence_mbarrier_init();
  }
  if (warp == dq::MULTIPLY_WARP) {
    ptx::tcgen05_alloc(at(&shared.tensor_memory), dq::COLUMNS);
    ptx::tcgen05_relinquish_alloc_permit();
  }
  if (threadIdx.x < 128) reinterpret_cast<uint32_t*>(shared.one)[threadIdx.x] = 0x7F7F7F7Fu;  // E8M0 1.0
  ptx::fence_proxy_async();
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  ptx::tcgen05_fence_after_thread_sync();
  const uint32_t tensor = shared.tensor_memory;

  if (warp < dq::STORE_WARPS) {
    dq::store(p, shared, tensor + lanes_of_warp(warp));
  } else if (warp == dq::LOAD_WARP) {
    if (ptx::elect_sync()) dq::load(p, shared);
    ptx::bar_warp_sync();
  } else if (warp == dq::MULTIPLY_WARP) {
    if (ptx::elect_sync()) dq::multiply(shared, tensor);
    ptx::bar_warp_sync();
  } else if (warp == dq::TABLE_WARP) {
    dq::make_tables(p, shared);
  }
  ptx::tcgen05_fence_before_thread_sync();
  __syncthreads();
  if (warp == dq::MULTIPLY_WARP) {
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_dealloc(tensor, dq::COLUMNS);
  }
}
