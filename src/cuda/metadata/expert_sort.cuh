// A stable counting sort of positions by expert, which gives every position its row. Every block
// counts its chunk of the positions, gets the counts of all blocks, and scatters its own chunk.
// Ranks come from warp votes and prefix sums, never from the order in which atomics are executed,
// so the result is the same in every run.
//
//   positions      launches       how a block gets the counts of other blocks
//   <= 8 * kSpan   sort           one cluster: from the others' shared memory (sum_cluster);
//                                 before sm_90: it counts all positions itself (count_all)
//   more           count, sort    from a table in global memory (sum_table)
#pragma once

#include "cuda/metadata/records.cuh"
#include "cuda/metadata/slot_view.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/sm90.cuh"

namespace sonicmoe::cuda {

inline constexpr int kSortWarps = kMetadataThreads / 32;
inline constexpr int kCountThreads = 256;
// Registers of a thread: a sorting block of 1024 threads and a counting block fit one
// multiprocessor.
inline constexpr int kSortRegisters = 56;
inline constexpr int kThreadPositions = 4;  // positions of a thread in a span
/// A span: the positions that a block ranks in shared memory at once.
inline constexpr int kSpan = kMetadataThreads * kThreadPositions;

/// The positions to sort, in token order, each with an expert.
struct Positions {
  SlotView expert;
  const std::int32_t* token;  // null: position / top_k
  const std::int32_t* slot;   // null: the position
  const std::int32_t* valid;  // how many positions are in use; null: all
  std::int64_t count;         // C
  std::int32_t experts;
  std::int32_t top_k;

  /// The expert of a position, -1 where there is none or where the position is past `end`.
  __device__ int expert_at(std::int64_t position, std::int64_t end) const {
    return position >= end ? -1 : expert.expert(expert.offset(position), experts);
  }
  __device__ std::int64_t end() const {
    return valid == nullptr ? count : min(count, static_cast<std::int64_t>(*valid));
  }
};

/// The order of the caller's pairs, as collect_slots finds it.
struct PairRanges {
  std::int32_t* begin;     // (E) the expert's first slot
  std::int32_t* end;       // (E) the slot past its last one; equal to begin if it has no slot
  std::int32_t* unsorted;  // 0: pairs are sorted by (expert, token), unusable pairs last

  /// Whether the pairs are sorted: then row p is slot p, and no sort is needed. False for ids.
  __device__ bool sorted() const { return unsorted != nullptr && *unsorted == 0; }
  /// Rows of thread e's expert.
  __device__ int rows(int experts) const {
    const int e = threadIdx.x;
    return e < experts ? end[e] - begin[e] : 0;
  }
};

struct SortParams {
  Positions positions;
  PairRanges ranges;
  std::uint16_t* table;  // (blocks, columns): positions of an expert in a block's chunk
  std::int32_t columns;  // E rounded up to a multiple of 4
  std::int32_t chunk;    // positions of a block, below 2^16
  Counters counters;
  Metadata out;
};

/// Shared memory of a sorting block. With 1024 experts it must fit into the 99 KB that a block can
/// have on 8.6, 8.9 and 12.0. Therefore counts of a span have 16 bits, and `record` shares the
/// memory of `in_warp`.
struct SortShared {
  std::int32_t* start;     // (columns) row of the block's next position of an expert
  std::int32_t* before;    // (columns) positions of an expert in earlier blocks
  std::int32_t* total;     // (columns) positions of an expert in all blocks
  std::uint16_t* local;    // (columns) index of an expert's first position in the sorted span
  std::uint16_t* counted;  // (columns) counts of this block, which its cluster reads
  std::uint32_t* sorted;   // (kSpan) index in the span | expert << 16
  std::uint16_t* in_warp;  // (warps, columns) counts by warp; used while a span is sorted
  std::int32_t* record;    // (columns) first record; used between two spans

  __device__ SortShared(void* base, int columns)
      : start(static_cast<std::int32_t*>(base)),
        before(start + columns),
        total(before + columns),
        local(reinterpret_cast<std::uint16_t*>(total + columns)),
        counted(local + columns),
        sorted(reinterpret_cast<std::uint32_t*>(counted + columns)),
        in_warp(reinterpret_cast<std::uint16_t*>(sorted + kSpan)),
        record(reinterpret_cast<std::int32_t*>(in_warp)) {}
  static constexpr std::size_t bytes(std::size_t columns) {
    return columns * (3 * sizeof(std::int32_t) + 2 * sizeof(std::uint16_t)) +
           kSpan * sizeof(std::uint32_t) + columns * kSortWarps * sizeof(std::uint16_t);
  }
};
static_assert(kSpan <= 0xffff, "counts and indices of a span have 16 bits");
static_assert(kSortWarps * sizeof(std::uint16_t) >= sizeof(std::int32_t), "record fits in_warp");

/// Adds the counts of the table to `total` and `before`, which the caller has set to zero.
__device__ inline void sum_table(const SortParams& p, const SortShared& s) {
  constexpr int kMostGroups = 32;  // more would only make atomicAdd wait
  const int quads = p.columns / 4;
  const int groups = min(kMetadataThreads / quads, kMostGroups);
  const int column = static_cast<int>(threadIdx.x) % quads;
  const int group = static_cast<int>(threadIdx.x) / quads;
  if (group >= groups) return;
  int total[4] = {};
  int before[4] = {};
#pragma unroll 4
  for (int b = group; b < static_cast<int>(gridDim.x); b += groups) {
    const auto* row = reinterpret_cast<const uint2*>(p.table + std::int64_t{b} * p.columns);
    const uint2 four = __ldcg(row + column);
    const unsigned counts[4] = {four.x & 0xffff, four.x >> 16, four.y & 0xffff, four.y >> 16};
    const bool earlier = b < static_cast<int>(blockIdx.x);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      total[i] += static_cast<int>(counts[i]);
      before[i] += earlier ? static_cast<int>(counts[i]) : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    atomicAdd(&s.total[column * 4 + i], total[i]);
    atomicAdd(&s.before[column * 4 + i], before[i]);
  }
}

/// Sets `total` and `before` from the counts of all blocks of the cluster, which each block reads
/// from the others' shared memory. No block may exit before all have read. Thread e passes its
/// block's `count` of expert e.
__device__ inline void sum_cluster(const SortParams& p, const SortShared& s, int count) {
  const int e = threadIdx.x;
  if (e < p.columns) s.counted[e] = static_cast<std::uint16_t>(count);
  ptx::cluster_sync();
  if (e >= p.columns) return;
  int total = 0;
  int before = 0;
#pragma unroll 8
  for (unsigned b = 0; b < gridDim.x; b++) {
    const int other = ptx::cluster_shared(s.counted, b)[e];
    total += other;
    before += b < blockIdx.x ? other : 0;
  }
  s.total[e] = total;
  s.before[e] = before;
}

/// Does the same as sum_cluster on GPUs without clusters: every block counts all positions.
__device__ inline void count_all(const SortParams& p, const SortShared& s) {
  const int e = threadIdx.x;
  if (e < p.columns) s.total[e] = s.before[e] = 0;
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * p.chunk;
  const std::int64_t end = p.positions.end();
  for (std::int64_t i = threadIdx.x; i < end; i += kMetadataThreads) {
    const int expert = p.positions.expert_at(i, end);
    if (expert < 0) continue;
    atomicAdd(&s.total[expert], 1);
    if (i < first) atomicAdd(&s.before[expert], 1);
  }
}

/// Counts the positions of each expert in a block's chunk. The block has few threads, so that a
/// sorting block fits beside it on a multiprocessor.
__global__ void __launch_bounds__(kCountThreads) count_positions(const SortParams p) {
  __shared__ int seen[kMaxMetadataExperts];
  for (int e = threadIdx.x; e < p.columns; e += kCountThreads) seen[e] = 0;
  ptx::wait_for_previous_kernel();
  // Only after the wait: the sorting kernel, which this launches, reads positions without a wait of
  // its own (ptx/dependent.cuh, rule 2).
  ptx::launch_next_kernel();
  if (p.ranges.sorted()) return;
  __syncthreads();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * p.chunk;
  const std::int64_t end = min(p.positions.end(), first + p.chunk);
#pragma unroll 8
  for (int i = threadIdx.x; i < p.chunk; i += kCountThreads) {
    const int expert = p.positions.expert_at(first + i, end);
    if (expert >= 0) atomicAdd(&seen[expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.columns; e += kCountThreads) {
    p.table[static_cast<std::int64_t>(blockIdx.x) * p.columns + e] =
        static_cast<std::uint16_t>(seen[e]);
  }
}

/// The kernel that counts the positions: the sorting kernel itself, or count_positions in a launch
/// before it, which fills the table. In the second case the sorting kernel ranks positions while
/// count_positions still runs.
enum class Counting { kInSort, kBeforeSort };

/// A thread's positions of a span. A warp has per_warp consecutive positions; position i of a lane
/// is number 32 i + lane of them.
struct ThreadPositions {
  int expert[kThreadPositions];
  int rank[kThreadPositions];  // index among those of its expert: in the warp, later in the span
  int per_warp;
  int valid;  // positions of the span that have an expert

  /// The index in the span of the thread's position i.
  __device__ int index(int i) const {
    return static_cast<int>(threadIdx.x) / 32 * per_warp + i * 32 +
           static_cast<int>(threadIdx.x) % 32;
  }
};

/// The part of a block's chunk that is not sorted yet.
struct Chunk {
  std::int64_t first;
  std::int64_t end;    // end of the positions; each gets a row or -1
  std::int64_t valid;  // end of the positions in use
};

/// Ranks positions within their warps, and sets in_warp[w] to the number of positions of each
/// expert in the warps before w. Returns how many positions of expert threadIdx.x the span has.
__device__ inline int rank_in_warps(const SortParams& p, const SortShared& s, const Chunk& chunk,
                                    ThreadPositions* own) {
  const int lane = threadIdx.x % 32;
  std::uint16_t* counts = s.in_warp + threadIdx.x / 32 * p.columns;
  const auto left =
      static_cast<int>(min(chunk.end - chunk.first, static_cast<std::int64_t>(kSpan)));
  own->per_warp = (max(left, 0) + kMetadataThreads - 1) / kMetadataThreads * 32;
#pragma unroll
  for (int i = 0; i < kThreadPositions; i++) {
    own->expert[i] = i * 32 < own->per_warp
                         ? p.positions.expert_at(chunk.first + own->index(i), chunk.valid)
                         : -1;
  }
  for (int i = lane; i < p.columns; i += 32) counts[i] = 0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kThreadPositions; i++) {
    if (i * 32 >= own->per_warp) break;
    const int expert = own->expert[i];
    const unsigned peers = __match_any_sync(~0u, expert);
    const int leader = __ffs(static_cast<int>(peers)) - 1;
    int base = 0;
    if (lane == leader && expert >= 0) {
      base = counts[expert];
      counts[expert] = static_cast<std::uint16_t>(base + __popc(peers));
    }
    own->rank[i] = __shfl_sync(~0u, base, leader) + __popc(peers & ((1u << lane) - 1));
    __syncwarp();
  }
  __syncthreads();
  int count = 0;
  if (static_cast<int>(threadIdx.x) < p.columns) {
    constexpr int kAtOnce = 8;  // counts that are read before any is written: the reads overlap
#pragma unroll 1
    for (int w = 0; w < kSortWarps; w += kAtOnce) {
      std::uint16_t* column = s.in_warp + w * p.columns + threadIdx.x;
      int value[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) value[i] = column[i * p.columns];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        column[i * p.columns] = static_cast<std::uint16_t>(count);
        count += value[i];
      }
    }
  }
  return count;
}

/// Sorts a span by expert in shared memory. Returns how many positions of expert threadIdx.x it
/// has.
__device__ inline int sort_span(const SortParams& p, const SortShared& s, const Chunk& chunk,
                                ThreadPositions* own) {
  const int count = rank_in_warps(p, s, chunk, own);
  const int local = block_prefix<kMetadataThreads>(count, &own->valid);
  if (static_cast<int>(threadIdx.x) < p.columns) {
    s.local[threadIdx.x] = static_cast<std::uint16_t>(local);
  }
  __syncthreads();
  const std::uint16_t* earlier = s.in_warp + threadIdx.x / 32 * p.columns;
#pragma unroll
  for (int i = 0; i < kThreadPositions; i++) {
    const int expert = own->expert[i];
    if (i * 32 >= own->per_warp || expert < 0) continue;
    own->rank[i] += earlier[expert];
    s.sorted[s.local[expert] + own->rank[i]] =
        static_cast<std::uint32_t>(expert) << 16 | static_cast<std::uint32_t>(own->index(i));
  }
  return count;
}

/// Writes a sorted span. Lists by position are written in the order of positions, lists by row in
/// runs of rows of one expert, so both stores are coalesced.
__device__ inline void write_span(const SortParams& p, const SortShared& s, const Chunk& chunk,
                                  const ThreadPositions& own) {
  const Positions& positions = p.positions;
#pragma unroll
  for (int i = 0; i < kThreadPositions; i++) {
    const std::int64_t position = chunk.first + own.index(i);
    if (i * 32 >= own.per_warp || position >= chunk.end) break;
    const int expert = own.expert[i];
    p.out.position_row[position] = expert >= 0 ? s.start[expert] + own.rank[i] : -1;
  }
  for (int i = threadIdx.x; i < own.valid; i += kMetadataThreads) {
    const std::uint32_t entry = s.sorted[i];
    const int expert = static_cast<int>(entry >> 16);
    const std::int32_t row = s.start[expert] + i - s.local[expert];
    const auto position = static_cast<std::int32_t>(chunk.first + (entry & 0xffff));
    p.out.row_token[row] = positions.token != nullptr
                               ? positions.token[position]
                               : static_cast<std::int32_t>(static_cast<unsigned>(position) /
                                                           static_cast<unsigned>(positions.top_k));
    p.out.row_slot[row] = positions.slot != nullptr ? positions.slot[position] : position;
  }
}

/// Writes the row ranges and tile records of experts whose rows follow each other without gaps.
/// Thread e passes the number of rows of expert e; the result is that expert's first row.
__device__ inline int write_rows(const Metadata& out, int experts, int rows,
                                 const ExpertArrays& all) {
  int sums[2] = {rows, records_of(rows)};
  int totals[2];
  block_prefix<kMetadataThreads>(sums, totals);
  write_records(out, experts, {sums[0], rows}, {sums[1], totals[1]}, all);
  return sums[0];
}

/// The sorting kernel. A block sorts its first span, gets the counts of all blocks, writes its part
/// of the tile records, and writes the span. Then it sorts and writes its other spans. If the pairs
/// are sorted already (PairRanges), it writes only the row ranges and the tile records.
template <Counting kCounting>
__global__ void __maxnreg__(kSortRegisters) sort_positions(const SortParams p) {
  extern __shared__ __align__(16) std::uint8_t shared[];
  const SortShared s(shared, p.columns);
  const int e = threadIdx.x;
  const int experts = p.positions.experts;
  if (kCounting == Counting::kInSort) {
    ptx::wait_for_previous_kernel();
  } else if (e < p.columns) {
    s.total[e] = s.before[e] = 0;
  }
  if (p.ranges.sorted()) {  // needs no counts
    ptx::wait_for_previous_kernel();
    ptx::launch_next_kernel();
    p.counters.clear();
    write_rows(p.out, experts, p.ranges.rows(experts), {s.record, s.total, s.before});
    return;
  }
  Chunk chunk{};
  chunk.first = static_cast<std::int64_t>(blockIdx.x) * p.chunk;
  chunk.end = min(p.positions.count, chunk.first + p.chunk);
  chunk.valid = min(p.positions.end(), chunk.end);
  ThreadPositions own;
  int count = sort_span(p, s, chunk, &own);
  if (kCounting == Counting::kBeforeSort) ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  p.counters.clear();
  if constexpr (kCounting == Counting::kBeforeSort) {
    __syncthreads();
    sum_table(p, s);
  } else if constexpr (ptx::kHasSm90) {
    sum_cluster(p, s, count);
  } else {
    count_all(p, s);
  }
  __syncthreads();
  const int rows = e < experts ? s.total[e] : 0;
  const int before = e < p.columns ? s.before[e] : 0;
  const int begin = write_rows(p.out, experts, rows, {s.record, s.total, s.before});
  if (e < p.columns) s.start[e] = begin + before;
  __syncthreads();
  for (;;) {
    write_span(p, s, chunk, own);
    chunk.first += kSpan;
    if (chunk.first >= chunk.end) break;
    __syncthreads();
    if (e < p.columns) s.start[e] += count;
    count = sort_span(p, s, chunk, &own);
    __syncthreads();
  }
  if (kCounting == Counting::kInSort) ptx::cluster_sync();  // other blocks may still read s.counted
}

}  // namespace sonicmoe::cuda
