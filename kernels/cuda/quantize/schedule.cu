// The tile table and the work items of a pack, from cu_seqlens on the device: the CUDA form of
// flamia.reference.layout.tile_offsets and flamia.reference.schedule, whose Note [Schedule] defines the order.
//
// One CTA for each of three lists, which need nothing from each other: CTA 0 the tile table, CTA 1 the forward's
// items, CTA 2 the backward's. A *unit* is an item without its head: a pair of query tiles, or a key tile, of one
// document. Units are sorted by key, largest first, by a radix sort, which is stable and so keeps the order of
// documents and tiles; then each unit becomes one item per head, at places that have a closed form.
//
// An illegal cu_seqlens empties every list and leaves its fault in the status, so that later kernels touch nothing.
#include "common/layout.cuh"

struct ScheduleParams {
  const void* cu_seqlens;   // (num_documents + 1), int32 or, if wide, int64
  layout::Tile* tiles;      // (max_tiles)
  int32_t* tile_offsets;    // (num_documents + 1)
  int4* forward_items;      // document, query head, first query tile, cost
  int4* backward_items;     // document, KV head, key tile, cost
  int32_t* status;          // see layout::Status
  uint8_t* workspace;       // for CTA 1 and 2, workspace_stride bytes each: unit offsets, then two lists of units
  int64_t num_tokens;
  int64_t max_length;  // tokens of a document at most
  int64_t workspace_stride;
  int32_t num_documents;
  int32_t wide;
  int32_t num_q_heads;
  int32_t num_kv_heads;
  int32_t causal;
  int32_t key_bits;  // that hold the largest cost
};
static_assert(sizeof(ScheduleParams) == PARAMS_BYTES, "ScheduleParams must match structs.SCHEDULE");

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr int DIGIT_BITS = 8;
constexpr int DIGITS = 1 << DIGIT_BITS;

// Faults of cu_seqlens, in the order in which flamia.reference.documents.validate_cu_seqlens looks for them; and that a
// document is longer than the caller said.
enum Fault { FIRST_NOT_ZERO = 1, DECREASES = 2, LAST_TOO_LARGE = 4, TOO_LONG = 8 };

enum Role { TILES = 0, FORWARD = 1, BACKWARD = 2 };

// What is sorted. `key` is the cost, up to a factor that all units share, or its leading digit.
struct alignas(16) Unit {
  uint32_t key;
  int32_t document;
  int32_t index;  // of the pair or key tile within the document
  int32_t tiles;  // of the document
};

struct Shared {
  uint32_t scan[WARPS];
  uint32_t count[WARPS][DIGITS];
  uint32_t base[DIGITS];
};

__device__ __forceinline__ int64_t boundary(const ScheduleParams& p, int i) {
  return p.wide ? static_cast<const int64_t*>(p.cu_seqlens)[i] : static_cast<const int32_t*>(p.cu_seqlens)[i];
}

// Exclusive sum of `value` over the threads of the CTA; `total` receives the whole sum.
__device__ __forceinline__ uint32_t scan_exclusive(uint32_t value, Shared& shared, uint32_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = value;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const uint32_t below = ptx::shfl_up(sum, lanes);
    if (lane >= lanes) sum += below;
  }
  __syncthreads();
  if (lane == 31) shared.scan[warp] = sum;
  __syncthreads();
  uint32_t warps = shared.scan[lane];
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const uint32_t below = ptx::shfl_up(warps, lanes);
    if (lane >= lanes) warps += below;
  }
  total = __shfl_sync(0xFFFFFFFFu, warps, 31);
  const uint32_t before = __shfl_sync(0xFFFFFFFFu, warps, (warp + 31) % 32);
  return (warp == 0 ? 0 : before) + sum - value;
}

// offsets[i] = units before document i, with their number at the end, which is returned; 0 if cu_seqlens is illegal.
__device__ __forceinline__ uint32_t offset_units(const ScheduleParams& p, int32_t* offsets, int tiles_per_unit,
                                                 Shared& shared, int& faults) {
  uint32_t running = 0;
  faults = 0;
  for (int first = 0; first < p.num_documents; first += THREADS) {
    const int i = first + threadIdx.x;
    int64_t start = 0, stop = 0;
    if (i < p.num_documents) {
      start = boundary(p, i);
      stop = boundary(p, i + 1);
    }
    if (i == 0 && start != 0) faults |= FIRST_NOT_ZERO;
    if (stop < start) faults |= DECREASES;
    if (stop - start > p.max_length) faults |= TOO_LONG;
    if (i == p.num_documents - 1 && stop > p.num_tokens) faults |= LAST_TOO_LARGE;
    const int64_t per_unit = int64_t(layout::TILE) * tiles_per_unit;
    const uint32_t units = uint32_t((stop - start + per_unit - 1) / per_unit);
    uint32_t total;
    const uint32_t before = scan_exclusive(units, shared, total);
    if (i < p.num_documents) offsets[i] = running + before;
    running += total;
  }
  if (p.num_documents == 0 && threadIdx.x == 0) {
    if (boundary(p, 0) != 0) faults |= FIRST_NOT_ZERO;
    if (boundary(p, 0) > p.num_tokens) faults |= LAST_TOO_LARGE;
  }
  int anyone = 0;
#pragma unroll
  for (int fault = FIRST_NOT_ZERO; fault <= TOO_LONG; fault *= 2) anyone |= __syncthreads_or(faults & fault) ? fault : 0;
  faults = anyone;
  if (faults) running = 0;
  if (threadIdx.x == 0) offsets[p.num_documents] = running;
  __syncthreads();
  return running;
}

// The document of a unit: the last one whose offset is not above it.
__device__ __forceinline__ int find_document(const int32_t* offsets, int num_documents, int unit) {
  int low = 0, high = num_documents;  // offsets[low] <= unit < offsets[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (offsets[middle] <= unit ? low : high) = middle;
  }
  return low;
}

__device__ __forceinline__ int tiles_of(const ScheduleParams& p, int document) {
  return int((boundary(p, document + 1) - boundary(p, document) + layout::TILE - 1) / layout::TILE);
}

__device__ __forceinline__ void write_tiles(const ScheduleParams& p, Shared& shared) {
  int faults;
  const int count = offset_units(p, p.tile_offsets, 1, shared, faults);
  for (int tile = threadIdx.x; tile < count; tile += THREADS) {
    const int document = find_document(p.tile_offsets, p.num_documents, tile);
    const int64_t start = boundary(p, document), length = boundary(p, document + 1) - start;
    const int index = tile - p.tile_offsets[document];
    const int64_t left = length - int64_t(index) * layout::TILE;
    p.tiles[tile] = {document, int32_t(start + int64_t(index) * layout::TILE), int32_t(min(left, int64_t(layout::TILE))),
                     index};
  }
  if (threadIdx.x < layout::NUM_STATUS - layout::TICKETS) p.status[layout::TICKETS + threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    p.status[layout::ERROR] = faults;
    p.status[layout::LEGAL] = faults == 0;
    p.status[layout::NUM_TILES] = count;
    p.status[layout::NUM_USED] = faults ? 0 : int32_t(boundary(p, p.num_documents));
  }
}

// The cost of a forward unit in visited tiles; of a backward unit, for one query head.
__device__ __forceinline__ uint32_t forward_cost(int tiles, int pair, bool causal) {
  const bool two = 2 * pair + 1 < tiles;
  if (causal) return two ? 4 * pair + 3 : 2 * pair + 1;
  return two ? 2 * tiles : tiles;
}
__device__ __forceinline__ uint32_t backward_cost(int tiles, int tile, bool causal) { return causal ? tiles - tile : tiles; }

// What the backward sorts by: of a cost its leading binary digit, where query heads do not share keys.
__device__ __forceinline__ uint32_t backward_key(uint32_t cost, int group) {
  return group == 1 ? 0x80000000u >> __clz(cost) : cost;
}

// One pass of the sort by one digit, largest first; stable.
__device__ __forceinline__ void sort_pass(const Unit* from, Unit* to, int count, int shift, Shared& shared) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x < DIGITS) shared.base[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += THREADS) atomicAdd(&shared.base[~(from[i].key >> shift) & (DIGITS - 1)], 1);
  __syncthreads();
  uint32_t total;
  const uint32_t own = threadIdx.x < DIGITS ? shared.base[threadIdx.x] : 0;
  const uint32_t before = scan_exclusive(own, shared, total);
  if (threadIdx.x < DIGITS) shared.base[threadIdx.x] = before;

  for (int first = 0; first < count; first += THREADS) {
    for (int i = threadIdx.x; i < WARPS * DIGITS; i += THREADS) shared.count[i / DIGITS][i % DIGITS] = 0;
    __syncthreads();
    const int i = first + threadIdx.x;
    const bool used = i < count;
    Unit unit = {};
    if (used) unit = from[i];
    const uint32_t digit = used ? ~(unit.key >> shift) & (DIGITS - 1) : DIGITS;
    const uint32_t peers = ptx::match_any(digit);
    const uint32_t rank = __popc(peers & ptx::lanemask_lt());
    if (used && rank == 0) shared.count[warp][digit] = __popc(peers);
    __syncthreads();
    if (threadIdx.x < DIGITS) {  // turn the counts into places
      uint32_t place = shared.base[threadIdx.x];
      for (int w = 0; w < WARPS; ++w) {
        const uint32_t here = shared.count[w][threadIdx.x];
        shared.count[w][threadIdx.x] = place;
        place += here;
      }
      shared.base[threadIdx.x] = place;
    }
    __syncthreads();
    if (used) to[shared.count[warp][digit] + rank] = unit;
    __syncthreads();
  }
}

// Units of one (document, key) are adjacent after the sort. `members` of them form a group, this one is `place`.
struct Group {
  int members;
  int place;
};

__device__ __forceinline__ Group forward_group(const Unit& u, bool causal) {
  const bool two = 2 * u.index + 1 < u.tiles;
  if (!causal) return two ? Group{u.tiles / 2, u.index} : Group{1, 0};
  // A single last tile of n = 4 w + 3 costs as much as pair w of its document, and follows it.
  if (two) return {u.tiles % 2 == 1 && u.tiles == 4 * u.index + 3 ? 2 : 1, 0};
  return u.tiles % 4 == 3 ? Group{2, 1} : Group{1, 0};
}
__device__ __forceinline__ Group backward_group(const Unit& u, bool causal, int group) {
  if (!causal) return {u.tiles, u.index};
  if (group > 1) return {1, 0};
  const int least = u.key, first = max(u.tiles - 2 * least + 1, 0);  // of costs from `least` to 2 `least` - 1
  return {u.tiles - least - first + 1, u.index - first};
}

template <bool FORWARD_PASS>
__device__ __forceinline__ void write_items(const ScheduleParams& p, uint8_t* workspace, Shared& shared) {
  const bool causal = p.causal;
  const int heads = FORWARD_PASS ? p.num_q_heads : p.num_kv_heads, group = p.num_q_heads / p.num_kv_heads;
  int32_t* const offsets = reinterpret_cast<int32_t*>(workspace);
  int faults;
  const int count = offset_units(p, offsets, FORWARD_PASS ? 2 : 1, shared, faults);
  Unit* units = reinterpret_cast<Unit*>(workspace + (int64_t(p.num_documents + 1) * 4 + 15) / 16 * 16);
  Unit* other = units + count;
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const int document = find_document(offsets, p.num_documents, i);
    const int index = i - offsets[document], tiles = tiles_of(p, document);
    const uint32_t key =
        FORWARD_PASS ? forward_cost(tiles, index, causal) : backward_key(backward_cost(tiles, index, causal), group);
    units[i] = {key, document, index, tiles};
  }
  __syncthreads();
  for (int shift = 0; shift < p.key_bits; shift += DIGIT_BITS) {
    sort_pass(units, other, count, shift, shared);
    Unit* const sorted = other;
    other = units;
    units = sorted;
  }
  int4* const items = FORWARD_PASS ? p.forward_items : p.backward_items;
  const uint32_t total = uint32_t(count) * heads;
  for (uint32_t i = threadIdx.x; i < total; i += THREADS) {
    const int place = i / heads, head = i % heads;
    const Unit u = units[place];
    const Group g = FORWARD_PASS ? forward_group(u, causal) : backward_group(u, causal, group);
    const uint32_t to = (place - g.place) * heads + head * g.members + g.place;
    const uint32_t cost = FORWARD_PASS ? u.key : backward_cost(u.tiles, u.index, causal) * group;
    items[to] = make_int4(u.document, head, FORWARD_PASS ? 2 * u.index : u.index, cost);
  }
  if (threadIdx.x == 0) p.status[FORWARD_PASS ? layout::NUM_FORWARD : layout::NUM_BACKWARD] = total;
}

extern "C" __global__ void __launch_bounds__(THREADS) build_schedule(const __grid_constant__ ScheduleParams p) {
  __shared__ Shared shared;
  if (blockIdx.x == TILES) {
    write_tiles(p, shared);
  } else if (blockIdx.x == FORWARD) {
    write_items<true>(p, p.workspace, shared);
  } else {
    write_items<false>(p, p.workspace + p.workspace_stride, shared);
  }
}
