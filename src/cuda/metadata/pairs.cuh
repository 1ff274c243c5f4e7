// Puts pairs, which may have any order, in token order: collect_slots collects the slots of every
// token in the token's bin, then order_tokens sorts the few slots of each token. collect_slots also
// finds out whether the pairs are already sorted by (expert, token), as token rounding writes them.
// In that case row p is slot p, and no sort by expert is needed.
#pragma once

#include "cuda/device/resident.cuh"
#include "cuda/metadata/expert_sort.cuh"

namespace sonicmoe::cuda {

inline constexpr int kTokenSpan = 4096;  // the least number of tokens in a span
inline constexpr int kMostSpans = 1024;
static_assert(kMostSpans == kMetadataThreads, "a thread has one span");
inline constexpr int kOrderLanes = 8;                                // lanes that sort one token
inline constexpr int kOrderTokens = kMetadataThreads / kOrderLanes;  // tokens of a block
inline constexpr int kMostBin = 64;
/// Blocks of order_tokens on a multiprocessor. With two a thread has 32 registers: enough from
/// sm_90 on, but code for sm_80 would spill.
inline constexpr int kOrderBlocks = resident_blocks(ptx::kHasSm90 ? 2 : 1, kMetadataThreads);

/// Working memory that clear_words() sets to zero; one contiguous array of words.
struct PairCounters {
  std::int32_t* per_token;  // (T)
  std::int32_t* overflow;   // (T) 1 + the last slot for which the token's bin had no room
  std::int32_t* span_sums;  // (kMostSpans) number of slots of a span's tokens
  PairRanges ranges;
  std::int64_t words;  // of all arrays, from per_token on
};

/// All working memory of this file.
struct PairArrays {
  PairCounters zero;
  std::int32_t* bins;             // (T, bin) a token's slots, in the order of the atomics
  std::int32_t* link;             // (C) 1 + the previous slot in the overflow list of the token
  std::int32_t* unordered;        // (C) slots of tokens whose bin has no room, by position
  std::int32_t* position_expert;  // (C)
  std::int32_t* position_token;   // (C)
};

struct PairParams {
  SlotView expert;     // (C)
  SlotView token;      // (C)
  std::int64_t count;  // C
  std::int64_t tokens;
  std::int32_t experts;
  std::int32_t span;   // tokens of a span, a multiple of kTokenSpan
  std::int32_t spans;  // at most kMostSpans
  std::int32_t bin;    // slots of a bin, kOrderLanes to kMostBin
  PairArrays arrays;
  Metadata out;
};

__global__ void __launch_bounds__(kMetadataThreads)
    clear_words(std::int32_t* words, std::int64_t count) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kMetadataThreads + threadIdx.x;
       i < count; i += static_cast<std::int64_t>(gridDim.x) * kMetadataThreads) {
    words[i] = 0;
  }
}

/// A slot's expert and token as one number, for comparisons. Unusable slots compare last.
struct PairKey {
  static constexpr std::uint64_t kUnusable = ~std::uint64_t{0};
  std::uint64_t bits;

  __device__ PairKey(const PairParams& p, std::int64_t slot) : bits(kUnusable) {
    if (slot >= p.count) return;
    const std::int64_t e = p.expert.integer(p.expert.offset(slot));
    const std::int64_t t = p.token.integer(p.token.offset(slot));
    const bool usable = e >= 0 && e < p.experts && t >= 0 && t < p.tokens;
    if (usable) bits = static_cast<std::uint64_t>(e) << 32 | static_cast<std::uint32_t>(t);
  }
  __device__ explicit PairKey(std::uint64_t b) : bits(b) {}
  __device__ bool usable() const { return bits != kUnusable; }
  __device__ int expert() const { return static_cast<int>(bits >> 32); }
  __device__ int token() const { return static_cast<int>(bits); }
};

/// Returns whether this warp's slots and the slot after them are sorted. If they are, writes where
/// experts begin and end among them. The ranges are valid only if all warps return true.
__device__ inline bool mark_ranges(const PairParams& p, std::int64_t slot, const PairKey& key) {
  const int lane = threadIdx.x % 32;
  std::uint64_t next = __shfl_down_sync(~0u, key.bits, 1);
  if (lane == 31) next = PairKey(p, slot + 1).bits;
  const bool sorted = __all_sync(~0u, key.bits <= next);
  const PairKey after(next);
  if (sorted && key.usable()) {
    if (slot == 0) p.arrays.zero.ranges.begin[key.expert()] = 0;
    if (!after.usable() || after.expert() != key.expert()) {
      p.arrays.zero.ranges.end[key.expert()] = static_cast<std::int32_t>(slot + 1);
      if (after.usable())
        p.arrays.zero.ranges.begin[after.expert()] = static_cast<std::int32_t>(slot + 1);
    }
  }
  return sorted;
}

/// Writes slots to the bins of their tokens. The order in a bin differs from run to run;
/// order_tokens sorts it. The token and slot of each row are written as if the pairs were sorted;
/// if they are not, sort_positions overwrites them.
__global__ void __launch_bounds__(kMetadataThreads) collect_slots(const PairParams p) {
  __shared__ std::int32_t sums[kMostSpans];
  sums[threadIdx.x] = 0;
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kMetadataThreads + threadIdx.x;
  const PairKey key(p, slot);
  const bool sorted = mark_ranges(p, slot, key);
  const bool any_unsorted = __syncthreads_or(sorted ? 0 : 1) != 0;
  if (any_unsorted && threadIdx.x == 0) *p.arrays.zero.ranges.unsorted = 1;
  if (key.usable()) {
    const int token = key.token();
    const auto entry = static_cast<std::int32_t>(slot);
    const std::int32_t arrival = atomicAdd(&p.arrays.zero.per_token[token], 1);
    atomicAdd(&sums[token / p.span], 1);
    if (arrival < p.bin) {
      p.arrays.bins[static_cast<std::int64_t>(token) * p.bin + arrival] = entry;
    } else {
      p.arrays.link[slot] = atomicExch(&p.arrays.zero.overflow[token], entry + 1);
    }
    p.out.row_token[slot] = token;
    p.out.row_slot[slot] = entry;
  }
  __syncthreads();
  const std::int32_t sum = sums[threadIdx.x];
  if (sum != 0) atomicAdd(&p.arrays.zero.span_sums[threadIdx.x], sum);
}

/// The slots of one token.
struct TokenSlots {
  std::int64_t token;
  std::int32_t begin;
  std::int32_t count;
  bool sorted;  ///< whether all pairs are sorted: then the order of slots is the order of experts

  /// The sort key of a slot: expert, then slot.
  __device__ std::uint64_t key(const PairParams& p, int i) const {
    if (i >= count) return ~std::uint64_t{0};
    const std::int32_t slot =
        i < p.bin ? p.arrays.bins[token * p.bin + i] : p.arrays.unordered[begin + i];
    const std::uint64_t expert =
        sorted ? 0 : static_cast<std::uint64_t>(p.expert.integer(p.expert.offset(slot)));
    return expert << 32 | static_cast<std::uint32_t>(slot);
  }
  __device__ void put(const PairParams& p, std::uint64_t key, int rank) const {
    const auto slot = static_cast<std::int32_t>(key);
    p.out.position_slot[begin + rank] = slot;
    if (sorted) {
      p.out.position_row[begin + rank] = slot;
    } else {
      p.arrays.position_expert[begin + rank] = static_cast<std::int32_t>(key >> 32);
      p.arrays.position_token[begin + rank] = static_cast<std::int32_t>(token);
    }
  }
};

/// kOrderLanes lanes sort the slots of one token, all in its bin, by (expert, slot). Each lane has
/// at most kEach slots and counts the smaller keys. Lanes without `active` only take part in
/// shuffles.
template <int kEach>
__device__ inline void order_brief(const PairParams& p, const TokenSlots& slots, bool active) {
  const int lane = threadIdx.x % kOrderLanes;
  std::uint64_t keys[kEach];
  int ranks[kEach] = {};
#pragma unroll
  for (int own = 0; own < kEach; own++) {
    keys[own] = active ? slots.key(p, own * kOrderLanes + lane) : 0;
  }
#pragma unroll
  for (int i = 0; i < kEach * kOrderLanes; i++) {
    const std::uint64_t other =
        __shfl_sync(~0u, keys[i / kOrderLanes], i % kOrderLanes, kOrderLanes);
#pragma unroll
    for (int own = 0; own < kEach; own++) ranks[own] += other < keys[own] ? 1 : 0;
  }
#pragma unroll
  for (int own = 0; own < kEach; own++) {
    if (active && own * kOrderLanes + lane < slots.count) slots.put(p, keys[own], ranks[own]);
  }
}

/// A warp sorts the slots of a token that has too many slots for order_brief or for its bin.
__device__ inline void order_long(const PairParams& p, const TokenSlots& slots) {
  const int lane = threadIdx.x % 32;
  if (lane == 0 && slots.count > p.bin) {
    std::int32_t slot = p.arrays.zero.overflow[slots.token] - 1;
    for (int i = p.bin; i < slots.count; i++) {
      p.arrays.unordered[slots.begin + i] = slot;
      slot = p.arrays.link[slot] - 1;
    }
  }
  __syncwarp();
  for (int i = 0; i < slots.count; i += 32) {
    const std::uint64_t own = slots.key(p, i + lane);
    int rank = 0;
    for (int j = 0; j < slots.count; j += 32) {
      const std::uint64_t other = slots.key(p, j + lane);
#pragma unroll
      for (int k = 0; k < 32; k++) rank += __shfl_sync(~0u, other, k) < own ? 1 : 0;
    }
    if (i + lane < slots.count) slots.put(p, own, rank);
  }
}

/// Computes the first position of each token of a block from the counts of all earlier tokens.
/// Thread i < kOrderTokens passes the count of token first + i; the result is that token's first
/// position.
__device__ inline int first_positions(const PairParams& p, std::int64_t first, int own) {
  const auto span = static_cast<int>(first / p.span);
  const bool earlier = static_cast<int>(threadIdx.x) < span;
  int base = earlier ? p.arrays.zero.span_sums[threadIdx.x] : 0;
  for (std::int64_t t = static_cast<std::int64_t>(span) * p.span + threadIdx.x; t < first;
       t += kMetadataThreads) {
    base += p.arrays.zero.per_token[t];
  }
  base = block_sum<kMetadataThreads>(base);
  int total = 0;
  return base + block_prefix<kMetadataThreads>(own, &total);
}

/// Sorts the slots of every token and writes positions and token_offsets.
__global__ void __launch_bounds__(kMetadataThreads, kOrderBlocks) order_tokens(const PairParams p) {
  __shared__ int begins[kOrderTokens];
  __shared__ int counts[kOrderTokens];
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const bool sorted = *p.arrays.zero.ranges.unsorted == 0;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kOrderTokens;
  const std::int64_t own = first + threadIdx.x;
  const bool scans = threadIdx.x < kOrderTokens;
  const int count = scans && own < p.tokens ? p.arrays.zero.per_token[own] : 0;
  const int begin = first_positions(p, first, count);
  if (scans) {
    begins[threadIdx.x] = begin;
    counts[threadIdx.x] = count;
    if (own <= p.tokens) p.out.token_offsets[own] = begin;
  }
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x) / kOrderLanes;  // token of the block
  const TokenSlots slots{first + i, begins[i], counts[i], sorted};
  const int lane = threadIdx.x % kOrderLanes;
  const bool brief = slots.count <= min(p.bin, 2 * kOrderLanes);
  if (__any_sync(~0u, brief && slots.count > kOrderLanes)) {
    order_brief<2>(p, slots, brief);
  } else {
    order_brief<1>(p, slots, brief);
  }
  for (unsigned left = __ballot_sync(~0u, !brief && lane == 0); left != 0; left &= left - 1) {
    const int from = __ffs(static_cast<int>(left)) - 1;
    order_long(p, {__shfl_sync(~0u, slots.token, from), __shfl_sync(~0u, slots.begin, from),
                   __shfl_sync(~0u, slots.count, from), sorted});
  }
  if (!sorted) return;
  int total = 0;
  block_prefix<kMetadataThreads>(
      static_cast<int>(threadIdx.x) < p.spans ? p.arrays.zero.span_sums[threadIdx.x] : 0, &total);
  for (std::int64_t i = total + first / kOrderTokens * kMetadataThreads + threadIdx.x; i < p.count;
       i += static_cast<std::int64_t>(gridDim.x) * kMetadataThreads) {
    p.out.position_row[i] = -1;
  }
}

}  // namespace sonicmoe::cuda
