// Placing: a stable counting sort of positions by expert. Every block counts its chunk, all counts
// are published as a table, and every block reads the whole table and places its own chunk. Ranks
// come from warp votes and prefix sums, never from the order in which atomics land.
//
// Few positions: one cluster, one launch. Many: a launch that counts, and one that places.
#pragma once

#include "cuda/metadata/records.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/sm90.cuh"

namespace sonicmoe::cuda {

inline constexpr int kPlaceWarps = kPlaceThreads / 32;
inline constexpr int kCountThreads = 256;
// 1024 threads of them and a counting block fit one multiprocessor.
inline constexpr int kPlaceRegisters = 56;
inline constexpr int kPlaceTurns = 4;                      // positions of a thread, at once
inline constexpr int kSpan = kPlaceThreads * kPlaceTurns;  // positions of a block, at once

/// A caller's integer array, int32 or int64, by element stride.
struct Ids {
  const void* data;
  std::int64_t stride0;  // of a token (ids) or of a pair
  std::int64_t stride1;  // of k
  std::int32_t wide;     // int64
  std::int32_t columns;  // K; 1 for what lies like a list

  __device__ std::int64_t at(std::int64_t slot) const {
    std::int64_t i = slot * stride0;
    if (columns > 1) {
      // Slots number less than 2^31; a 64-bit division costs ten times a 32-bit one.
      const auto s = static_cast<unsigned>(slot);
      const unsigned row = s / static_cast<unsigned>(columns);
      i = row * stride0 + (s - row * static_cast<unsigned>(columns)) * stride1;
    }
    return wide != 0 ? static_cast<const std::int64_t*>(data)[i]
                     : static_cast<const std::int32_t*>(data)[i];
  }
};

inline Ids ids_of(const Tensor& t) {
  const bool list = t.rank == 1 || (t.stride[1] == 1 && t.stride[0] == t.shape[1]);
  return {t.data, t.rank == 1 ? t.stride[0] : (list ? 1 : t.stride[0]), list ? 0 : t.stride[1],
          t.dtype == DType::kI64 ? 1 : 0, list ? 1 : static_cast<std::int32_t>(t.shape[1])};
}

/// What is placed: positions in token order, each with an expert.
struct Positions {
  Ids expert;
  const std::int32_t* token;  // null: position / top_k
  const std::int32_t* slot;   // null: the position
  const std::int32_t* valid;  // how many are in use; null: all
  std::int64_t count;         // C
  std::int32_t experts;
  std::int32_t top_k;

  /// The expert of a position, or -1. Compared as 64 bits.
  __device__ int expert_at(std::int64_t position, std::int64_t end) const {
    if (position >= end) return -1;
    const std::int64_t e = expert.at(position);
    return e < 0 || e >= experts ? -1 : static_cast<int>(e);
  }
  __device__ std::int64_t end() const {
    return valid == nullptr ? count : min(count, static_cast<std::int64_t>(*valid));
  }
};

/// What the collection of pairs finds out about their order.
struct PairRanges {
  std::int32_t* begin;     // (E) the expert's first slot
  std::int32_t* end;       // (E) the one past its last; begin where it has none
  std::int32_t* unsorted;  // 0: pairs are sorted by (expert, token), unusable ones last

  /// Whether rows are slots, so that nothing is left to place. Never for ids.
  __device__ bool sorted() const { return unsorted != nullptr && *unsorted == 0; }
  /// Rows of thread e's expert.
  __device__ int rows(int experts) const {
    const int e = threadIdx.x;
    return e < experts ? end[e] - begin[e] : 0;
  }
};

struct PlaceParams {
  Positions positions;
  PairRanges ranges;
  std::uint16_t* table;  // (blocks, columns): positions of an expert in a block's chunk
  std::int32_t columns;  // E rounded up to a multiple of 4
  std::int32_t chunk;    // positions of a block, below 2^16
  Counters counters;
  Metadata out;
};

/// Shared memory of a placing block.
struct PlaceShared {
  std::int32_t* start;     // (columns) row of the block's next position of an expert
  std::int32_t* local;     // (columns) the same within the span
  std::int32_t* before;    // (columns) rows in earlier blocks
  std::int32_t* total;     // (columns)
  std::int32_t* record;    // (columns) first record
  std::int32_t* counted;   // (columns) of this block, for the others of its cluster
  std::uint32_t* sorted;   // (kSpan) position in the span | expert << 16
  std::uint16_t* in_warp;  // (warps, columns)

  __device__ PlaceShared(void* base, int columns)
      : start(static_cast<std::int32_t*>(base)),
        local(start + columns),
        before(local + columns),
        total(before + columns),
        record(total + columns),
        counted(record + columns),
        sorted(reinterpret_cast<std::uint32_t*>(counted + columns)),
        in_warp(reinterpret_cast<std::uint16_t*>(sorted + kSpan)) {}
  static std::size_t bytes(int columns) {
    return static_cast<std::size_t>(columns) * 6 * 4 + kSpan * 4 +
           static_cast<std::size_t>(columns) * kPlaceWarps * 2;
  }
};

/// Adds up the table: total rows of every expert, and those in the blocks before this one.
__device__ inline void sum_table(const PlaceParams& p, const PlaceShared& s) {
  constexpr int kMostGroups = 32;  // more would only collide in the sums
  const int quads = p.columns / 4;
  const int groups = min(kPlaceThreads / quads, kMostGroups);
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

/// The same among the blocks of a cluster, from each other's shared memory, which has to stay until
/// all have read it.
__device__ inline void sum_cluster(const PlaceParams& p, const PlaceShared& s, int count) {
  const int e = threadIdx.x;
  if (e < p.columns) s.counted[e] = count;
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

/// Counts the positions of a block's chunk. Small, so that a placing block has room beside it.
__global__ void __launch_bounds__(kCountThreads) count_positions(const PlaceParams p) {
  __shared__ int seen[kMostPlaced];
  for (int e = threadIdx.x; e < p.columns; e += kCountThreads) seen[e] = 0;
  ptx::wait_for_previous_kernel();
  // Only from here on: whoever starts early may rely on what this kernel waited for.
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

/// kWhole: one cluster counts, exchanges its counts and places. kAfterCount: the counts are there
/// once the kernel before has ended; ranks are found while it still runs.
enum class Placing { kWhole, kAfterCount };

/// A thread's positions of a span: 32 * turns consecutive ones for every warp.
struct Turns {
  int expert[kPlaceTurns];
  int rank[kPlaceTurns];  // among the warp's positions of the same expert, then the span's
  int per_warp;
  int valid;  // of the span, with an expert

  __device__ int local(int turn) const {
    return static_cast<int>(threadIdx.x) / 32 * per_warp + turn * 32 +
           static_cast<int>(threadIdx.x) % 32;
  }
};

/// What is left of a block's chunk.
struct Chunk {
  std::int64_t first;
  std::int64_t end;    // of positions, which all get a row or -1
  std::int64_t valid;  // end of those in use
};

/// Ranks within warps; in_warp becomes the positions of an expert in the warps before. Returns how
/// many thread e's expert has in the span.
__device__ inline int rank_in_warps(const PlaceParams& p, const PlaceShared& s, const Chunk& chunk,
                                    Turns* turns) {
  const int lane = threadIdx.x % 32;
  std::uint16_t* mine = s.in_warp + threadIdx.x / 32 * p.columns;
  const auto left =
      static_cast<int>(min(chunk.end - chunk.first, static_cast<std::int64_t>(kSpan)));
  turns->per_warp = (max(left, 0) + kPlaceThreads - 1) / kPlaceThreads * 32;
#pragma unroll
  for (int i = 0; i < kPlaceTurns; i++) {
    turns->expert[i] = i * 32 < turns->per_warp
                           ? p.positions.expert_at(chunk.first + turns->local(i), chunk.valid)
                           : -1;
  }
  for (int i = lane; i < p.columns; i += 32) mine[i] = 0;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kPlaceTurns; i++) {
    if (i * 32 >= turns->per_warp) break;
    const int expert = turns->expert[i];
    const unsigned peers = __match_any_sync(~0u, expert);
    const int leader = __ffs(static_cast<int>(peers)) - 1;
    int base = 0;
    if (lane == leader && expert >= 0) {
      base = mine[expert];
      mine[expert] = static_cast<std::uint16_t>(base + __popc(peers));
    }
    turns->rank[i] = __shfl_sync(~0u, base, leader) + __popc(peers & ((1u << lane) - 1));
    __syncwarp();
  }
  __syncthreads();
  int count = 0;
  if (static_cast<int>(threadIdx.x) < p.columns) {
    constexpr int kAtOnce = 8;  // read before any is written, so that the reads overlap
#pragma unroll 1
    for (int w = 0; w < kPlaceWarps; w += kAtOnce) {
      std::uint16_t* own = s.in_warp + w * p.columns + threadIdx.x;
      int value[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) value[i] = own[i * p.columns];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        own[i * p.columns] = static_cast<std::uint16_t>(count);
        count += value[i];
      }
    }
  }
  return count;
}

/// Sorts a span by expert in shared memory. Returns how many thread e's expert has in it.
__device__ inline int sort_span(const PlaceParams& p, const PlaceShared& s, const Chunk& chunk,
                                Turns* turns) {
  const int count = rank_in_warps(p, s, chunk, turns);
  const int local = block_prefix<kPlaceThreads>(count, &turns->valid);
  if (static_cast<int>(threadIdx.x) < p.columns) s.local[threadIdx.x] = local;
  __syncthreads();
  const std::uint16_t* earlier = s.in_warp + threadIdx.x / 32 * p.columns;
#pragma unroll
  for (int i = 0; i < kPlaceTurns; i++) {
    const int expert = turns->expert[i];
    if (i * 32 >= turns->per_warp || expert < 0) continue;
    turns->rank[i] += earlier[expert];
    s.sorted[s.local[expert] + turns->rank[i]] =
        static_cast<std::uint32_t>(expert) << 16 | static_cast<std::uint32_t>(turns->local(i));
  }
  return count;
}

/// Writes a sorted span: positions in order, rows in runs of one expert.
__device__ inline void write_span(const PlaceParams& p, const PlaceShared& s, const Chunk& chunk,
                                  const Turns& turns) {
  const Positions& positions = p.positions;
#pragma unroll
  for (int i = 0; i < kPlaceTurns; i++) {
    const std::int64_t position = chunk.first + turns.local(i);
    if (i * 32 >= turns.per_warp || position >= chunk.end) break;
    const int expert = turns.expert[i];
    p.out.position_row[position] = expert >= 0 ? s.start[expert] + turns.rank[i] : -1;
  }
  for (int i = threadIdx.x; i < turns.valid; i += kPlaceThreads) {
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

/// Experts and records from the rows of thread e's expert, which lie one behind the other. Returns
/// the first.
__device__ inline int write_rows(const Metadata& out, int experts, int rows,
                                 const ExpertArrays& room) {
  int sums[2] = {rows, records_of(rows)};
  int totals[2];
  block_prefix<kPlaceThreads>(sums, totals);
  write_records(out, experts, {sums[0], rows}, {sums[1], totals[1]}, room);
  return sums[0];
}

template <Placing kPlacing>
__global__ void __maxnreg__(kPlaceRegisters) place_positions(const PlaceParams p) {
  extern __shared__ __align__(16) std::uint8_t shared[];
  const PlaceShared s(shared, p.columns);
  const int e = threadIdx.x;
  const int experts = p.positions.experts;
  if (kPlacing == Placing::kWhole) {
    ptx::wait_for_previous_kernel();
  } else if (e < p.columns) {
    s.total[e] = s.before[e] = 0;
  }
  if (p.ranges.sorted()) {  // known before the counts are
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
  Turns turns;
  int count = sort_span(p, s, chunk, &turns);
  if (kPlacing == Placing::kAfterCount) ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  p.counters.clear();
  if (kPlacing == Placing::kAfterCount) {
    __syncthreads();
    sum_table(p, s);
  } else {
    sum_cluster(p, s, count);
  }
  __syncthreads();
  const int rows = e < experts ? s.total[e] : 0;
  const int before = e < p.columns ? s.before[e] : 0;
  const int begin = write_rows(p.out, experts, rows, {s.record, s.total, s.before});
  if (e < p.columns) s.start[e] = begin + before;
  __syncthreads();
  for (;;) {
    write_span(p, s, chunk, turns);
    chunk.first += kSpan;
    if (chunk.first >= chunk.end) break;
    __syncthreads();
    if (e < p.columns) s.start[e] += count;
    count = sort_span(p, s, chunk, &turns);
    __syncthreads();
  }
  if (kPlacing == Placing::kWhole) ptx::cluster_sync();
}

}  // namespace sonicmoe::cuda
