// Writes the sorted lists of pairs, with their weights, from the tokens that every expert keeps.
#pragma once

#include "cuda/metadata/block.cuh"
#include "cuda/routing/round_marks.cuh"
#include "sonicmoe/routing.h"

namespace sonicmoe::cuda {

/// The caller's lists.
struct PairsView {
  std::int32_t* token;
  std::int32_t* expert;
  float* weight;
  std::int64_t* offsets;
  std::int64_t token_stride;
  std::int64_t expert_stride;
  std::int64_t weight_stride;
  std::int64_t offsets_stride;
  std::int64_t capacity;

  __device__ void set(std::int64_t i, int t, int e, float w) const {
    token[i * token_stride] = t;
    expert[i * expert_stride] = e;
    weight[i * weight_stride] = w;
  }
};

inline PairsView view_of(const Pairs& pairs) {
  return {static_cast<std::int32_t*>(pairs.token.data),
          static_cast<std::int32_t*>(pairs.expert.data),
          static_cast<float*>(pairs.weight.data),
          static_cast<std::int64_t*>(pairs.offsets.data),
          pairs.token.stride[0],
          pairs.expert.stride[0],
          pairs.weight.stride[0],
          pairs.offsets.stride[0],
          pairs.token.shape[0]};
}

/// The bits of a thread's 32 tokens in a stretch.
struct StretchBits {
  std::uint32_t kept;
  std::uint32_t chosen;

  __device__ StretchBits(const TileMarks* marks, const KeptTokens& kept_tokens, std::int64_t first)
      : kept(0), chosen(0) {
    const std::int64_t tile = first + threadIdx.x / 2;
    const int half = static_cast<int>(threadIdx.x % 2) * 32;
    if (tile >= kept_tokens.tiles) return;
    kept = static_cast<std::uint32_t>(kept_tokens.bits[tile] >> half);
    chosen = static_cast<std::uint32_t>(marks[tile].chosen >> half);
  }
};

/// A listed token is its index in the stretch, plus kAdded if top-k did not choose it.
inline constexpr unsigned kAdded = 0x8000u;
static_assert(kStretchTokens <= kAdded);

/// Lists this thread's kept tokens from list[index] on.
__device__ inline void list_bits(const StretchBits& bits, int index, std::uint16_t* list) {
  for (std::uint32_t left = bits.kept; left != 0; left &= left - 1) {
    const int bit = __ffs(static_cast<int>(left)) - 1;
    const unsigned added = (bits.chosen >> bit & 1) != 0 ? 0 : kAdded;
    list[index++] = static_cast<std::uint16_t>(threadIdx.x * 32 + bit + added);
  }
}

/// Indices of a block's pairs.
struct ListIndex {
  std::int64_t first;  // first pair of the block's range
  std::int64_t all;    // pairs of all experts
  int own;             // this thread's first token in the list of the stretch
  int count;           // tokens in the list of the stretch
};

/// Computes the index of this block's first pair from the rows of all experts. The first block
/// writes all offsets. One prefix sum gives all values that the block needs.
__device__ inline ListIndex list_index(const KeptTokens& kept, const PairsView& out,
                                       const StretchBits& bits) {
  constexpr int kEach = kMaxExperts / kListThreads;
  __shared__ int own;
  const int e = blockIdx.x;
  const int experts = gridDim.x;
  const bool writes = blockIdx.x == 0 && blockIdx.y == 0;
  int values[3] = {0, 0, __popc(bits.kept)};
  int rows[kEach];
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int other = static_cast<int>(threadIdx.x) * kEach + i;
    rows[i] = other < experts ? kept.rows[other] : 0;
    values[0] += rows[i];
  }
  for (int r = threadIdx.x; r < static_cast<int>(blockIdx.y); r += kListThreads) {
    values[1] += kept.ranges[e * kept.range_count + r];
  }
  int totals[3];
  block_prefix<kListThreads>(values, totals);
  int before = values[0];
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int other = static_cast<int>(threadIdx.x) * kEach + i;
    if (other == e) own = before;
    if (writes && other < experts) out.offsets[other * out.offsets_stride] = before;
    before += rows[i];
  }
  if (writes && threadIdx.x == 0) out.offsets[experts * out.offsets_stride] = totals[0];
  __syncthreads();
  return {std::int64_t{own} + totals[1], totals[0], values[2], totals[2]};
}

/// Writes kAtOnce of a thread's pairs; their loads overlap.
template <int kAtOnce>
__device__ void write_pairs(const PairScores& scores, const PairsView& out, std::int64_t at,
                            int first, int count, const std::uint16_t* list) {
  const int e = blockIdx.x;
  int token[kAtOnce];
  float weight[kAtOnce];
#pragma unroll
  for (int k = 0; k < kAtOnce; k++) {
    const unsigned entry = list[min(k * kListThreads, count - 1)];
    token[k] = first + static_cast<int>(entry % kAdded);
    weight[k] = scores.weight(token[k], e, entry < kAdded);
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; k++) {
    if (k * kListThreads < count) out.set(at + k * kListThreads, token[k], e, weight[k]);
  }
}

/// Writes the pairs of one expert (blockIdx.x) and one range of tokens (blockIdx.y). All blocks
/// together mark the entries past the last pair as empty.
__device__ inline void list_range(const PairScores& scores, const TileMarks* marks,
                                  const KeptTokens& all, const PairsView& out) {
  __shared__ std::uint16_t list[kStretchTokens];
  const int e = blockIdx.x;
  const KeptTokens kept = all.of(e);
  const TileMarks* own = marks + e * all.tiles;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.y) * all.range_tiles;
  const std::int64_t end = min(begin + all.range_tiles, all.tiles);
  StretchBits bits(own, kept, begin);
  ListIndex index = list_index(all, out, bits);
  std::int64_t at = index.first;
  for (std::int64_t tile = begin; tile < end; tile += kStretchTiles) {
    if (tile > begin) {
      bits = StretchBits(own, kept, tile);
      index.own = block_prefix<kListThreads>(__popc(bits.kept), &index.count);
    }
    list_bits(bits, index.own, list);
    __syncthreads();
    const auto first = static_cast<int>(tile * kTileTokens);
#pragma unroll 1
    for (int i = threadIdx.x; i < index.count; i += 2 * kListThreads) {
      const int left = index.count - i;
      if (left + static_cast<int>(threadIdx.x % 32) > kListThreads) {
        write_pairs<2>(scores, out, at + i, first, left, list + i);
      } else {
        write_pairs<1>(scores, out, at + i, first, left, list + i);
      }
    }
    at += index.count;
    __syncthreads();
  }
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * gridDim.y * kListThreads;
  for (std::int64_t i = index.all +
                        (static_cast<std::int64_t>(blockIdx.y) * gridDim.x + e) * kListThreads +
                        threadIdx.x;
       i < out.capacity; i += threads) {
    out.set(i, -1, static_cast<int>(gridDim.x), 0.0f);
  }
}

}  // namespace sonicmoe::cuda
