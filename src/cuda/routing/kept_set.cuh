// The set of tokens that one expert keeps: the tokens that top-k chose, with some added or removed.
#pragma once

#include "cuda/routing/round_search.cuh"

namespace sonicmoe::cuda {

/// Shared memory of a block that selects tokens.
struct SelectSmem {
  SearchSmem search;
  std::int32_t kept[kMostRanges];  // number of kept tokens in each range
};

/// One expert's tokens and which of them it keeps.
struct KeptSet {
  ExpertTokens x;
  KeptTokens kept;  // of this expert
  SelectSmem* smem;

  /// Adds tokens of kOthers, or removes tokens of kChosen: the first ones in the order of the side,
  /// up to and including the token with key `last`.
  __device__ void toggle(const TokenSearch& search, Side side, std::uint64_t last) const {
    search.each([&](std::uint64_t order) {
      if (order < last) return;
      const int token = TokenOrder::token(side, order);
      atomicXor(reinterpret_cast<unsigned*>(kept.bits) + token / 32, 1u << token % 32);
      atomicAdd(&smem->kept[kept.range_of(token)], side == Side::kOthers ? 1 : -1);
    });
  }
  /// The same for the first m tokens.
  __device__ void toggle(Side side, int m) const {
    const TokenSearch search(x, side, m, &smem->search);
    toggle(search, side, search.last(m));
  }
  /// The sum of p over the same tokens, in fixed point.
  __device__ std::uint64_t mass(const TokenSearch& search, Side side, std::uint64_t last) const {
    const ScoreMode score = x.scores.score;
    std::uint64_t sum = 0;
    search.each([&](std::uint64_t order) {
      if (order < last) return;
      sum += key::score_mass(score, key::score_of_rank(score, TokenOrder::p(side, order)));
    });
    return block_sum<kSearchThreads>(sum);
  }
  /// Writes the number of kept tokens, of each range and in all.
  __device__ void finish(int rows) const {
    __syncthreads();
    for (int r = threadIdx.x; r < kept.range_count; r += kSearchThreads) {
      kept.ranges[r] = smem->kept[r];
    }
    if (threadIdx.x == 0) *kept.rows = rows;
  }
};

/// Begins with the tokens that top-k chose. Returns their number.
__device__ inline int keep_chosen(const KeptSet& t) {
  for (int r = threadIdx.x; r < t.kept.range_count; r += kSearchThreads) t.smem->kept[r] = 0;
  __syncthreads();
  int count = 0;
  for (std::int64_t first = threadIdx.x / 32 * 32; first < t.kept.tiles; first += kSearchThreads) {
    const std::int64_t tile = first + threadIdx.x % 32;
    std::uint64_t chosen = 0;
    if (tile < t.kept.tiles) t.kept.bits[tile] = chosen = t.x.marks[tile].chosen;
    const int warp = __reduce_add_sync(kAllLanes, __popcll(chosen));
    if (threadIdx.x % 32 != 0 || warp == 0) continue;
    count += warp;
    atomicAdd(&t.smem->kept[first / t.kept.range_tiles], warp);
  }
  return block_sum<kSearchThreads>(count);
}

}  // namespace sonicmoe::cuda
