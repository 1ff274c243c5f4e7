// Adds the partial sums of other ranks to this rank's sum of a token, one chunk at a time.
#pragma once

#include "cuda/math/element.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/sums/sum_rows.h"

namespace sonicmoe::cuda {

/// Converts `ranks` for a launch whose token 0 is token `first`.
inline RankSums from_token(const RankSums& ranks, std::int64_t first, std::int64_t row_bytes) {
  RankSums part = ranks;
  part.rows += first * row_bytes;
  part.masks += first;
  return part;
}

__device__ __forceinline__ void unpack(std::uint32_t (&words)[2], const uint2& v) {
  words[0] = v.x;
  words[1] = v.y;
}
__device__ __forceinline__ void unpack(std::uint32_t (&words)[4], const uint4& v) {
  words[0] = v.x;
  words[1] = v.y;
  words[2] = v.z;
  words[3] = v.w;
}
__device__ __forceinline__ void pack(uint2& v, const std::uint32_t (&words)[2]) {
  v = {words[0], words[1]};
}
__device__ __forceinline__ void pack(uint4& v, const std::uint32_t (&words)[4]) {
  v = {words[0], words[1], words[2], words[3]};
}

/// Bit r: rank r has a partial sum of the token. Loaded for each use, so that it takes no register
/// in between.
__device__ __forceinline__ std::uint64_t mask_of(const RankSums& ranks, std::int64_t token) {
  const uint2 words = ptx::load8(ranks.masks + token);
  return static_cast<std::uint64_t>(words.y) << 32 | words.x;
}

/// The first rank, except this one, that has a partial sum; -1 if there is none.
__device__ __forceinline__ int first_other(const RankSums& ranks, std::uint64_t mask) {
  return __ffsll(static_cast<long long>(mask & ~(std::uint64_t{1} << ranks.own))) - 1;
}

/// The partial sums of other ranks at byte `at` of (T, d). The chunk of the first other rank is
/// loaded early, together with the token's rows; chunks of further ranks are loaded when they are
/// added.
template <class Chunk>
struct OtherSums {
  Chunk first{};

  __device__ __forceinline__ void load_first(const RankSums& ranks, std::int64_t token,
                                             std::int64_t at) {
    const int r = first_other(ranks, mask_of(ranks, token));
    if (r >= 0) first = load(ranks, r, at);
  }

  /// The sum over all ranks, in rank order. `own` is this rank's sum.
  template <class Element>
  __device__ __forceinline__ Chunk add(const RankSums& ranks, std::int64_t token, std::int64_t at,
                                       const Chunk& own) const {
    constexpr int kWords = sizeof(Chunk) / 4;
    const std::uint64_t mask = mask_of(ranks, token);
    const int loaded = first_other(ranks, mask);
    float total[2 * kWords] = {};
    for (std::uint64_t left = mask; left != 0; left &= left - 1) {
      const int r = __ffsll(static_cast<long long>(left)) - 1;
      std::uint32_t words[kWords];
      unpack(words, r == ranks.own ? own : r == loaded ? first : load(ranks, r, at));
#pragma unroll
      for (int i = 0; i < kWords; i++) {
        total[2 * i] += Pair<Element>::low(words[i]);
        total[2 * i + 1] += Pair<Element>::high(words[i]);
      }
    }
    const bool fault = *static_cast<const volatile std::uint32_t*>(ranks.fault) != 0;
    std::uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      words[i] = fault ? ~0u : Pair<Element>::pack(total[2 * i], total[2 * i + 1]);  // NaN
    }
    Chunk sum;
    pack(sum, words);
    return sum;
  }

 private:
  static __device__ __forceinline__ Chunk load(const RankSums& ranks, int r, std::int64_t at) {
    return *reinterpret_cast<const Chunk*>(ranks.rows + r * ranks.rank_bytes + at);
  }
};

/// OwnSum and SumOverRanks are template arguments of the sum kernels. They decide what a kernel
/// writes for a token: its own sum, or the sum over all ranks. So the kernels of a layer on one GPU
/// need no registers for other ranks. `at` is an offset in bytes in (T, d).
struct OwnSum {
  template <class Chunk>
  struct Others {};
  template <class Chunk>
  __device__ __forceinline__ Others<Chunk> load(std::int64_t, std::int64_t) const {
    return {};
  }
  /// The result. `own` is the sum of this launch.
  template <class Element, class Chunk>
  __device__ __forceinline__ Chunk add(const Others<Chunk>&, std::int64_t, std::int64_t,
                                       const Chunk& own) const {
    return own;
  }
};
struct SumOverRanks {
  RankSums ranks;  ///< if masks is null, the result is the sum of this launch
  template <class Chunk>
  using Others = OtherSums<Chunk>;

  template <class Chunk>
  __device__ __forceinline__ Others<Chunk> load(std::int64_t token, std::int64_t at) const {
    Others<Chunk> others;
    if (ranks.masks != nullptr) others.load_first(ranks, token, at);
    return others;
  }
  template <class Element, class Chunk>
  __device__ __forceinline__ Chunk add(const Others<Chunk>& others, std::int64_t token,
                                       std::int64_t at, const Chunk& own) const {
    return ranks.masks == nullptr ? own : others.template add<Element>(ranks, token, at, own);
  }
};

}  // namespace sonicmoe::cuda
