// Rank keys of a block of tokens: collected as rows in shared memory, written as columns by expert.
#pragma once

#include "cuda/routing/launch.cuh"

namespace sonicmoe::cuda {

inline constexpr int kRankTokens =
    32;  // tokens of a block, one for each lane when columns are written
inline constexpr int kRankWarps = 8;
inline constexpr int kRankThreads = 32 * kRankWarps;

/// Words between the tokens of a block's tile of keys: 16-byte reads by 32 tokens hit all banks.
constexpr int tile_stride(int experts) { return (experts + 31) / 32 * 32 + 4; }

/// A lane's probabilities as rank keys, nobody chosen yet.
template <class R>
__device__ void store_keys(const float (&probability)[R::kValues], std::uint32_t* keys) {
#pragma unroll
  for (int v = 0; v < R::kValues; v += 4) {
    const uint4 four = {key::rank_key(probability[v], 0), key::rank_key(probability[v + 1], 0),
                        key::rank_key(probability[v + 2], 0), key::rank_key(probability[v + 3], 0)};
    *reinterpret_cast<uint4*>(keys + R::first() + v) = four;
  }
}

/// Where the columns are.
struct KeyColumns {
  std::uint32_t* keys;  // (E, stride)
  std::int64_t stride;
};

/// Column strides are multiples of 4, so that four keys can be read at once.
inline std::int64_t key_stride_of(std::int64_t tokens) { return (tokens + 3) / 4 * 4; }

/// A block's tile, rows `tile_row` words apart, to columns: tokens `first` and the 31 after it.
__device__ inline void write_columns(const RouteParams& p, const std::uint32_t* tile, int tile_row,
                                     const KeyColumns& out, std::int64_t first) {
  const std::int64_t token = first + threadIdx.x % 32;
  if (token >= p.tokens) return;
  const std::uint32_t* mine = tile + threadIdx.x % 32 * tile_row;
  for (int e = threadIdx.x / 32 * 4; e < p.experts; e += kRankWarps * 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(mine + e);
    std::uint32_t* to = out.keys + e * out.stride + token;
    to[0] = four.x;
    if (e + 1 < p.experts) to[out.stride] = four.y;
    if (e + 2 < p.experts) to[2 * out.stride] = four.z;
    if (e + 3 < p.experts) to[3 * out.stride] = four.w;
  }
}

}  // namespace sonicmoe::cuda
