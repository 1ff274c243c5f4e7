// Pairs in any order to positions in token order: count per token, scan, scatter, order each token.
#pragma once

#include "cuda/metadata_place.cuh"

namespace sonicmoe::cuda {

inline constexpr int kTokenSpan = 4096;  // tokens whose counts a block scans at once
inline constexpr int kMostSpans = 1024;
inline constexpr int kOrderThreads = 256;
inline constexpr int kOrderLanes = 8;  // of a token

struct PairParams {
  Ids expert;
  Ids token;
  std::int64_t count;  // C
  std::int64_t tokens;
  std::int32_t experts;
  std::int32_t span;        // tokens of a span, a multiple of kTokenSpan
  std::int32_t spans;       // at most kMostSpans
  std::int32_t* per_token;  // (T), zero
  std::int32_t* span_sums;  // (spans), zero
  std::int32_t* arrival;    // (C) which of its token's slots came first; -1 where unusable
  std::int32_t* unordered;  // (C) slots by token
  std::int32_t* offsets;    // (T+1) first position of a token
  std::int32_t* slot;       // (C) of a position, as are the next two
  std::int32_t* position_expert;
  std::int32_t* position_token;
};

/// How many usable slots a token has. Which slot arrives when changes from run to run: order_tokens
/// makes up for it.
__global__ void __launch_bounds__(kPlaceThreads) count_tokens(const PairParams p) {
  __shared__ std::int32_t sums[kMostSpans];
  sums[threadIdx.x] = 0;
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  __syncthreads();
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kPlaceThreads + threadIdx.x;
  if (slot < p.count) {
    const std::int64_t e = p.expert.at(slot);
    const std::int64_t t = p.token.at(slot);
    const bool usable = e >= 0 && e < p.experts && t >= 0 && t < p.tokens;
    p.arrival[slot] = usable ? atomicAdd(&p.per_token[t], 1) : -1;
    if (usable) atomicAdd(&sums[t / p.span], 1);
  }
  __syncthreads();
  const std::int32_t sum = sums[threadIdx.x];
  if (sum != 0) atomicAdd(&p.span_sums[threadIdx.x], sum);
}

/// A block a span.
__global__ void __launch_bounds__(kPlaceThreads) scan_tokens(const PairParams p) {
  constexpr int kPerThread = kTokenSpan / kPlaceThreads;
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  std::int32_t base = 0;
  block_prefix<kPlaceThreads>(threadIdx.x < blockIdx.x ? p.span_sums[threadIdx.x] : 0, &base);
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * p.span;
  for (std::int64_t at = begin; at < begin + p.span; at += kTokenSpan) {
    const std::int64_t first = at + threadIdx.x * kPerThread;
    std::int32_t own[kPerThread];
    std::int32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      own[i] = first + i < p.tokens ? p.per_token[first + i] : 0;
      sum += own[i];
    }
    std::int32_t all = 0;
    std::int32_t offset = base + block_prefix<kPlaceThreads>(sum, &all);
#pragma unroll
    for (int i = 0; i < kPerThread; i++) {
      if (first + i <= p.tokens) p.offsets[first + i] = offset;
      offset += own[i];
    }
    base += all;
  }
}

__global__ void __launch_bounds__(kPlaceThreads) scatter_slots(const PairParams p) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  const std::int64_t slot = static_cast<std::int64_t>(blockIdx.x) * kPlaceThreads + threadIdx.x;
  if (slot >= p.count) return;
  const std::int32_t arrival = p.arrival[slot];
  if (arrival < 0) return;
  p.unordered[p.offsets[p.token.at(slot)] + arrival] = static_cast<std::int32_t>(slot);
}

/// The slots of one token.
struct TokenSlots {
  std::int64_t token;
  std::int32_t begin;
  std::int32_t count;

  /// By expert, then by slot: what they are put in order by.
  __device__ std::uint64_t key(const PairParams& p, int i) const {
    if (i >= count) return ~std::uint64_t{0};
    const std::int32_t slot = p.unordered[begin + i];
    return static_cast<std::uint64_t>(p.expert.at(slot)) << 32 | static_cast<std::uint32_t>(slot);
  }
  __device__ void put(const PairParams& p, std::uint64_t key, int rank) const {
    p.slot[begin + rank] = static_cast<std::int32_t>(key);
    p.position_expert[begin + rank] = static_cast<std::int32_t>(key >> 32);
    p.position_token[begin + rank] = static_cast<std::int32_t>(token);
  }
};

/// A warp orders a token of more than kOrderLanes slots.
__device__ inline void order_long(const PairParams& p, const TokenSlots& slots) {
  const int lane = threadIdx.x % 32;
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

/// kOrderLanes lanes order the slots of one token by (expert, slot): each counts those before its
/// own.
__global__ void __launch_bounds__(kOrderThreads) order_tokens(const PairParams p) {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  TokenSlots slots{};
  slots.token = (static_cast<std::int64_t>(blockIdx.x) * kOrderThreads + threadIdx.x) / kOrderLanes;
  if (slots.token < p.tokens) {
    slots.begin = p.offsets[slots.token];
    slots.count = p.offsets[slots.token + 1] - slots.begin;
  }
  const int lane = threadIdx.x % kOrderLanes;
  const bool brief = slots.count <= kOrderLanes;
  const std::uint64_t key = brief ? slots.key(p, lane) : 0;
  int rank = 0;
#pragma unroll
  for (int i = 0; i < kOrderLanes; i++) {
    rank += __shfl_sync(~0u, key, i, kOrderLanes) < key ? 1 : 0;
  }
  if (brief && lane < slots.count) slots.put(p, key, rank);
  for (unsigned left = __ballot_sync(~0u, !brief && lane == 0); left != 0; left &= left - 1) {
    const int from = __ffs(static_cast<int>(left)) - 1;
    order_long(p, {__shfl_sync(~0u, slots.token, from), __shfl_sync(~0u, slots.begin, from),
                   __shfl_sync(~0u, slots.count, from)});
  }
}

}  // namespace sonicmoe::cuda
