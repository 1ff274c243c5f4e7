// Rank keys of a block of tokens: collected as rows in shared memory, written as columns by expert.
//
// A column keeps the upper 16 bits of a rank key, without the sign that p never has: they settle
// all but a few tokens, whose p is found again from the logit.
#pragma once

#include "cuda/routing/launch.cuh"

namespace sonicmoe::cuda {

using CutKey = std::uint16_t;
inline constexpr int kCutBits = 15;  // of p, and as many are cut off
inline constexpr unsigned kCutMask = (1u << kCutBits) - 1;
inline constexpr unsigned kCutChosen = 1u << kCutBits;

/// The bits of p, which is in [0, 1], below its cut key.
__device__ inline unsigned low_key(float p) { return key::rank_key(p, 0) & kCutMask; }
/// The cut keys of two, side by side: the upper halves without the sign.
__device__ inline std::uint32_t two_cut_keys(float first, float second) {
  return __byte_perm(key::rank_key(first, 0) << 1, key::rank_key(second, 0) << 1, 0x7632);
}

inline constexpr int kRankTokens = 64;  // of a block, two for each lane when columns are written
inline constexpr int kRankWarps = 8;
inline constexpr int kRankThreads = 32 * kRankWarps;

/// Keys between the rows of a block's tile: 16-byte reads by 32 rows hit all banks.
constexpr int tile_stride(int experts) { return (experts + 63) / 64 * 64 + 8; }

/// A token's row in the tile: even tokens first, so that a lane's two tokens are 32 rows apart and
/// neighbouring lanes read neighbouring rows.
__device__ inline int tile_row(int token) { return token % 2 * 32 + token / 2; }

/// A lane's probabilities as cut keys, nobody chosen yet.
template <class R>
__device__ void store_keys(const float (&probability)[R::kValues], CutKey* keys) {
#pragma unroll
  for (int v = 0; v < R::kValues; v += 8) {
    std::uint32_t two[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      two[i] = two_cut_keys(probability[v + 2 * i], probability[v + 2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(keys + R::first() + v) = {two[0], two[1], two[2], two[3]};
  }
}

/// Where the columns are.
struct KeyColumns {
  CutKey* keys;  // (E, stride)
  std::int64_t stride;
};

/// Column strides are multiples of 8, so that eight keys can be read at once.
inline std::int64_t key_stride_of(std::int64_t tokens) { return (tokens + 7) / 8 * 8; }

/// A block's tile, rows `row_keys` apart, to columns: tokens `first` and the 63 after it.
__device__ inline void write_columns(const RouteParams& p, const CutKey* tile, int row_keys,
                                     const KeyColumns& out, std::int64_t first) {
  const int lane = threadIdx.x % 32;
  const std::int64_t token = first + 2 * lane;
  if (token >= p.tokens) return;
  for (int e = threadIdx.x / 32 * 8; e < p.experts; e += kRankWarps * 8) {
    const uint4 even = *reinterpret_cast<const uint4*>(tile + lane * row_keys + e);
    const uint4 odd = *reinterpret_cast<const uint4*>(tile + (lane + 32) * row_keys + e);
    const unsigned a[4] = {even.x, even.y, even.z, even.w};
    const unsigned b[4] = {odd.x, odd.y, odd.z, odd.w};
    CutKey* to = out.keys + e * out.stride + token;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const unsigned two = __byte_perm(a[i / 2], b[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
      if (e + i < p.experts) *reinterpret_cast<std::uint32_t*>(to + i * out.stride) = two;
    }
  }
}

/// p of a token and an expert once more.
struct Probabilities {
  LogitsView logits;
  const Softmax* softmax;  // (T); of no use for sigmoid routing
  ScoreMode score;

  __device__ float of(int token, int expert) const { return found(*this, token, expert); }

 private:
  // Not inlined: it is wanted in many places, seldom, by kernels that wait for their code.
  static __device__ __noinline__ float found(Probabilities p, int token, int expert) {
    const float x = logit_at(p.logits, token, expert);
    return p.score == ScoreMode::kSigmoid ? key::sigmoid32(x) : p.softmax[token](x);
  }
};

}  // namespace sonicmoe::cuda
