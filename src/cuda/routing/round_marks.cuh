// Results of the ranking: a few words for each expert and 64 tokens, and for every token the
// softmaxes from which p and weights are computed again. So the logits are the only (T, E) matrix.
#pragma once

#include <algorithm>

#include "cuda/device/carver.h"
#include "cuda/routing/launch.cuh"

namespace sonicmoe::cuda {

inline constexpr int kTileTokens = 64;
inline constexpr int kGroupTokens = 16;
inline constexpr int kTileGroups = kTileTokens / kGroupTokens;

/// The cut of a rank p (key::rank_of): the upper 16 of its 32 bits. The first two are 0, because it
/// is at most 1.
inline constexpr int kCutBits = 14;
__device__ inline unsigned cut_of(float p) { return key::bits_of(p) >> 16; }
__device__ inline std::uint32_t two_cuts(float first, float second) {
  return __byte_perm(key::bits_of(first), key::bits_of(second), 0x7632);
}
/// The inverted cut: larger for smaller p, and never 0.
__device__ inline unsigned inverted_cut_of(float p) { return cut_of(p) ^ ((1u << kCutBits) - 1); }

/// Marks of kTileTokens tokens for one expert. `best` and `worst` have an entry for each group of
/// kGroupTokens tokens: a bound of the p of its tokens, so that a search reads only the groups that
/// can have one of the tokens that it looks for. An entry is 0 if the group has no such token;
/// `best` is also 0 if p is 0.
struct TileMarks {
  std::uint64_t chosen;              ///< a bit for each token
  std::uint16_t best[kTileGroups];   ///< the largest cut of the tokens that did not choose
  std::uint16_t worst[kTileGroups];  ///< the largest inverted cut of those that did
};

/// One token's softmaxes, in one 32-byte sector.
struct alignas(32) TokenSoftmaxes {
  Softmax all;    ///< p of any expert
  Softmax slots;  ///< the score of a chosen expert
  float divisor;  ///< of renormalisation
};

/// Ranks and weights of pairs, bit for bit as the ranking computed them.
struct PairScores {
  LogitsView logits;
  const TokenSoftmaxes* softmaxes;  // (T)
  ScoreMode score;
  std::int32_t renormalize;
  float scale;

  /// key::rank_of the pair's p.
  __device__ float rank(int token, int expert) const {
    const Softmax all = softmaxes[token].all;
    return key::rank_of(score, score_of(score, all, logit_at(logits, token, expert)));
  }
  /// The weight of a pair that top-k chose, or of a pair that rounding added.
  __device__ float weight(int token, int expert, bool chosen) const {
    const TokenSoftmaxes own = softmaxes[token];
    const float x = logit_at(logits, token, expert);
    Softmax softmax = own.all;
    if (chosen) softmax = own.slots;
    const float raw = score_of(score, softmax, x);
    const float normalized = chosen && renormalize != 0 ? key::div32(raw, own.divisor) : raw;
    return key::mul32(normalized, scale);
  }
};

/// The tokens that a block ranks: a tile, or one group if there are few tokens or little shared
/// memory.
template <int kWarpCount, int kTokenCount>
struct RankShape {
  static constexpr int kWarps = kWarpCount;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTokens = kTokenCount;
  static constexpr int kWarpTokens = kTokens / kWarps;
  static constexpr int kGroups = kTokens / kGroupTokens;
};
using RankTile = RankShape<8, kTileTokens>;
using RankGroup = RankShape<4, kGroupTokens>;

/// A block's marks in shared memory, by expert.
template <class R, class Shape>
struct TileSmem {
  static constexpr int kExperts = R::kLanes * R::kValues;
  static constexpr int kRows = 32 / R::kLanes;  // that a warp reads at once
  static constexpr int kChosenWords = (Shape::kTokens + 31) / 32;
  static constexpr int kZeroWords =
      kExperts * (kChosenWords + Shape::kGroups + Shape::kWarps * kRows / 2);
  static constexpr int kBytes = kZeroWords * 4 + Shape::kWarps * kExperts * 2;

  std::uint32_t* chosen;  // (kChosenWords, kExperts): a bit for each token
  std::uint32_t* worst;   // (kGroups, kExperts)
  std::uint16_t* taken;   // (warps, kRows, kExperts): all ones if the row being read chose it
  std::uint16_t* best;    // (warps, kExperts)

  __device__ explicit TileSmem(void* base)
      : chosen(static_cast<std::uint32_t*>(base)),
        worst(chosen + kChosenWords * kExperts),
        taken(reinterpret_cast<std::uint16_t*>(worst + Shape::kGroups * kExperts)),
        best(taken + Shape::kWarps * kRows * kExperts) {}

  __device__ void clear() const {
#pragma unroll 4
    for (int i = threadIdx.x; i < kZeroWords; i += Shape::kThreads) chosen[i] = 0;
  }
  /// `taken` of the row that this lane reads.
  __device__ std::uint16_t* taken_here() const {
    return taken + static_cast<int>(threadIdx.x) / R::kLanes * kExperts;
  }
  /// Marks a pair that top-k chose; `token` counts from the block's first.
  __device__ void choose(int token, int e, float p) const {
    atomicOr(&chosen[token / 32 * kExperts + e], 1u << token % 32);
    atomicMax(&worst[token / kGroupTokens * kExperts + e], inverted_cut_of(p));
  }
  /// Stores the largest cut of each of this lane's experts, over all lanes that hold these experts.
  /// `two` has two cuts in a word.
  __device__ void store_best(std::uint32_t (&two)[R::kValues / 2]) const {
#pragma unroll
    for (int i = 0; i < R::kValues / 2; i++) {
      for (int d = R::kLanes; d < 32; d *= 2) {
        two[i] = __vmaxu2(two[i], __shfl_xor_sync(kAllLanes, two[i], d));
      }
    }
    auto* to = reinterpret_cast<uint4*>(best + threadIdx.x / 32 * kExperts + R::first());
    if (threadIdx.x % 32 >= R::kLanes) return;
#pragma unroll
    for (int i = 0; i < R::kValues / 8; i++) {
      to[i] = {two[4 * i], two[4 * i + 1], two[4 * i + 2], two[4 * i + 3]};
    }
  }
  /// Writes an expert's marks: those of the whole tile, or of the block's group.
  __device__ void write(int e, TileMarks* to) const {
    TileMarks marks{};
    constexpr int kWarps = Shape::kWarps / Shape::kGroups;  // of a group
#pragma unroll
    for (int g = 0; g < Shape::kGroups; g++) {
      marks.worst[g] = static_cast<std::uint16_t>(worst[g * kExperts + e]);
#pragma unroll
      for (int w = g * kWarps; w < (g + 1) * kWarps; w++) {
        marks.best[g] = max(marks.best[g], best[w * kExperts + e]);
      }
    }
    if constexpr (Shape::kGroups == 1) {
      const int g = static_cast<int>(blockIdx.x) % kTileGroups;
      reinterpret_cast<std::uint16_t*>(&to->chosen)[g] = static_cast<std::uint16_t>(chosen[e]);
      to->best[g] = marks.best[0];
      to->worst[g] = marks.worst[0];
    } else {
      marks.chosen = std::uint64_t{chosen[kExperts + e]} << 32 | chosen[e];
      *to = marks;
    }
  }
  /// Writes all experts' marks.
  __device__ void write_all(int experts, TileMarks* marks, std::int64_t tiles) const {
    const std::int64_t tile = static_cast<std::int64_t>(blockIdx.x) * Shape::kTokens / kTileTokens;
    for (int e = threadIdx.x; e < experts; e += Shape::kThreads) write(e, marks + e * tiles + tile);
  }
};

inline constexpr int kListThreads = 256;
/// A stretch: the tokens that a block lists at once, 32 for each thread.
inline constexpr int kStretchTiles = kListThreads / 2;
inline constexpr int kStretchTokens = kStretchTiles * kTileTokens;
inline constexpr int kMostRanges = 256;

/// The tokens that experts keep. One block lists one range of tokens.
struct KeptTokens {
  std::uint64_t* bits;   // (E, tiles)
  std::int32_t* ranges;  // (E, range_count): how many of a range are kept
  std::int32_t* rows;    // (E)
  std::int64_t tiles;
  std::int32_t range_tiles;  // a multiple of kStretchTiles
  std::int32_t range_count;  // at least 1, at most kMostRanges

  __device__ int range_of(int token) const { return token / kTileTokens / range_tiles; }
  /// The view of one expert.
  __device__ KeptTokens of(int e) const {
    return {bits + e * tiles, ranges + e * range_count, rows + e, tiles, range_tiles, range_count};
  }
};

inline KeptTokens kept_tokens(std::int64_t tokens) {
  constexpr std::int64_t kMost = std::int64_t{kStretchTiles} * kMostRanges;
  KeptTokens kept{};
  kept.tiles = (tokens + kTileTokens - 1) / kTileTokens;
  kept.range_tiles = static_cast<std::int32_t>(
      std::max<std::int64_t>(1, (kept.tiles + kMost - 1) / kMost) * kStretchTiles);
  kept.range_count = static_cast<std::int32_t>(
      std::max<std::int64_t>(1, (kept.tiles + kept.range_tiles - 1) / kept.range_tiles));
  return kept;
}

/// Carves the caller's scratch.
using ScratchCarver = Carver<256>;

inline void carve_kept(ScratchCarver* carver, std::int64_t experts, KeptTokens* kept) {
  kept->bits = carver->take<std::uint64_t>(experts * kept->tiles);
  kept->ranges = carver->take<std::int32_t>(experts * kept->range_count);
  kept->rows = carver->take<std::int32_t>(experts);
}

}  // namespace sonicmoe::cuda
