// Which of one expert's tokens are kept: those that were chosen, until some are turned.
#pragma once

#include "cuda/routing/round_search.cuh"

namespace sonicmoe::cuda {

/// Shared memory of a block that selects.
struct SelectRoom {
  SearchRoom search;
  std::int32_t kept[kMostRanges];  // of every range
};

/// One expert's tokens and what becomes of them.
struct Turning {
  ExpertTokens x;
  KeptTokens kept;  // of this expert
  SelectRoom* room;

  /// Turns the first m of a side, which end with `last`.
  __device__ void turn(const TokenSearch& search, Side side, std::uint64_t last) const {
    search.each([&](std::uint64_t order) {
      if (order < last) return;
      const int token = TokenOrder::token(side, order);
      atomicXor(reinterpret_cast<unsigned*>(kept.bits) + token / 32, 1u << token % 32);
      atomicAdd(&room->kept[kept.range_of(token)], side == Side::kOthers ? 1 : -1);
    });
  }
  __device__ void turn(Side side, int m) const {
    const TokenSearch search(x, side, m, &room->search);
    turn(search, side, search.last(m));
  }
  static __device__ std::uint64_t mass(const TokenSearch& search, Side side, std::uint64_t last) {
    std::uint64_t sum = 0;
    search.each([&](std::uint64_t order) {
      if (order >= last) sum += key::mass(TokenOrder::p(side, order));
    });
    return block_sum<kSearchThreads>(sum);
  }
  /// Hands over how many rows are kept.
  __device__ void finish(int rows) const {
    __syncthreads();
    for (int r = threadIdx.x; r < kept.range_count; r += kSearchThreads) {
      kept.ranges[r] = room->kept[r];
    }
    if (threadIdx.x == 0) *kept.rows = rows;
  }
};

/// Everybody who was chosen is kept, to begin with. Returns how many they are.
__device__ inline int keep_chosen(const Turning& t) {
  for (int r = threadIdx.x; r < t.kept.range_count; r += kSearchThreads) t.room->kept[r] = 0;
  __syncthreads();
  int count = 0;
  for (std::int64_t first = threadIdx.x / 32 * 32; first < t.kept.tiles; first += kSearchThreads) {
    const std::int64_t tile = first + threadIdx.x % 32;
    std::uint64_t chosen = 0;
    if (tile < t.kept.tiles) t.kept.bits[tile] = chosen = t.x.marks[tile].chosen;
    const int warp = __reduce_add_sync(kAllLanes, __popcll(chosen));
    if (threadIdx.x % 32 != 0 || warp == 0) continue;
    count += warp;
    atomicAdd(&t.room->kept[first / t.kept.range_tiles], warp);
  }
  return block_sum<kSearchThreads>(count);
}

}  // namespace sonicmoe::cuda
