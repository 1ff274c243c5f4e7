// Adds the partial sums of other ranks to this rank's sum of a token, one chunk at a time.
#pragma once

#include "cuda/math/element.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/lane.cuh"
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

/// A chunk of NaN, in bf16 and in fp16.
template <class Chunk>
__device__ __forceinline__ Chunk nan_chunk() {
  std::uint32_t words[sizeof(Chunk) / 4];
  for (std::uint32_t& word : words) word = ~0u;
  Chunk chunk;
  pack(chunk, words);
  return chunk;
}

/// Bit r: rank r has a partial sum of the token.
__device__ __forceinline__ std::uint64_t mask_of(const RankSums& ranks, std::int64_t token) {
  const uint2 words = ptx::load8(ranks.masks + token);
  return static_cast<std::uint64_t>(words.y) << 32 | words.x;
}

/// The first rank, except this one, that has a partial sum; -1 if there is none.
__device__ __forceinline__ int first_other(const RankSums& ranks, std::uint64_t mask) {
  return __ffsll(static_cast<long long>(mask & ~(std::uint64_t{1} << ranks.own))) - 1;
}

/// A token, and the first other rank that has a partial sum of it. The mask of all such ranks is
/// loaded again when it is needed, from L1, so that it takes no register in between.
struct TokenRanks {
  std::uint32_t token = 0;
  int first = -1;
};

template <class Chunk>
__device__ __forceinline__ Chunk load_sums(const RankSums& ranks, int r, std::int64_t at) {
  return *reinterpret_cast<const Chunk*>(ranks.rows + r * ranks.rank_bytes + at);
}

/// The ranks after the first other one whose chunks a thread has registers for. On 9.0 those of
/// four ranks are loaded together; elsewhere two of them would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
inline constexpr int kFurtherRanks = 2;
#else
inline constexpr int kFurtherRanks = 1;
#endif

/// The chunks of the ranks after the first other rank at kPieces places of a token, for a kernel
/// that has registers for them: all are loaded before the first is used.
template <class Chunk, int kPieces>
struct FurtherSums {
  int rank[kFurtherRanks];  ///< -1: none
  Chunk chunk[kFurtherRanks][kPieces];

  __device__ __forceinline__ FurtherSums(const RankSums& ranks, const TokenRanks& of) {
    // Without a first one there are no others: the mask is not needed.
    std::uint64_t left = of.first < 0 ? 0 : mask_of(ranks, of.token);
    left &= ~(std::uint64_t{1} << ranks.own);
#pragma unroll
    for (int& r : rank) {
      left &= left - 1;
      r = __ffsll(static_cast<long long>(left)) - 1;
    }
  }
  __device__ __forceinline__ void load(const RankSums& ranks, int piece, std::int64_t at) {
#pragma unroll
    for (int i = 0; i < kFurtherRanks; i++) {
      if (rank[i] >= 0) chunk[i][piece] = load_sums<Chunk>(ranks, rank[i], at);
    }
  }
};

/// The partial sums of other ranks at byte `at` of (T, d). The chunk of the first other rank is
/// loaded early, together with the token's rows; chunks of further ranks are loaded when they are
/// added, unless FurtherSums has them.
template <class Chunk>
struct OtherSums {
  Chunk first{};

  __device__ __forceinline__ void load_first(const RankSums& ranks, const TokenRanks& of,
                                             std::int64_t at) {
    if (of.first >= 0) first = load_sums<Chunk>(ranks, of.first, at);
  }

  /// The sum over all ranks, in rank order. `own` is this rank's sum.
  template <class Element>
  __device__ __forceinline__ Chunk add(const RankSums& ranks, const TokenRanks& of, std::int64_t at,
                                       const Chunk& own) const {
    return add_all<Element>(ranks, of, own, [&](int r) { return load_sums<Chunk>(ranks, r, at); });
  }
  template <class Element, int kPieces>
  __device__ __forceinline__ Chunk add(const RankSums& ranks, const TokenRanks& of, std::int64_t at,
                                       const Chunk& own, const FurtherSums<Chunk, kPieces>& further,
                                       int piece) const {
    return add_all<Element>(ranks, of, own, [&](int r) {
      constexpr int kLast = kFurtherRanks - 1;
      if (r == further.rank[0]) return further.chunk[0][piece];
      if (kLast > 0 && r == further.rank[kLast]) return further.chunk[kLast][piece];
      return load_sums<Chunk>(ranks, r, at);
    });
  }

 private:
  /// chunk_of(r) is the chunk of a rank after the first other one.
  template <class Element, class ChunkOf>
  __device__ __forceinline__ Chunk add_all(const RankSums& ranks, const TokenRanks& of,
                                           const Chunk& own, const ChunkOf& chunk_of) const {
    constexpr int kWords = sizeof(Chunk) / 4;
    float total[2 * kWords] = {};
    // pinned(): else the compiler keeps the mask's address in two registers.
    const std::uint32_t token = ptx::pinned(of.token);
    for (std::uint64_t left = mask_of(ranks, token); left != 0; left &= left - 1) {
      const int r = __ffsll(static_cast<long long>(left)) - 1;
      std::uint32_t words[kWords];
      unpack(words, r == ranks.own ? own : r == of.first ? first : chunk_of(r));
#pragma unroll
      for (int i = 0; i < kWords; i++) {
        total[2 * i] += Pair<Element>::low(words[i]);
        total[2 * i + 1] += Pair<Element>::high(words[i]);
      }
    }
    std::uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      words[i] = Pair<Element>::pack(total[2 * i], total[2 * i + 1]);
    }
    Chunk sum;
    pack(sum, words);
    return sum;
  }
};

/// OwnSum and SumOverRanks are template arguments of the sum kernels. They decide what a kernel
/// writes for a token: its own sum, or the sum over all ranks. So the kernels of a layer on one GPU
/// need no registers for other ranks. `at` is an offset in bytes in (T, d).
///
/// A kernel calls ranks_of() once for each token (or part of a token that a warp sums), before it
/// loads the rows. load() needs the result: if load() read the mask itself, it would wait for
/// memory twice while no other load is in flight. A kernel may also ask for further() for the
/// pieces of a token, and load them. If fault() is true, the kernel writes NaN. It
/// calls fault() as rarely as ranks_of(), because each call waits for L2.
struct OwnSum {
  struct Ranks {};
  template <class Chunk>
  struct Others {};
  template <class Chunk, int kPieces>
  struct Further {};
  __device__ __forceinline__ Ranks ranks_of(std::int64_t) const { return {}; }
  __device__ __forceinline__ bool fault() const { return false; }
  template <class Chunk>
  __device__ __forceinline__ Others<Chunk> load(Ranks, std::int64_t) const {
    return {};
  }
  template <class Chunk, int kPieces>
  __device__ __forceinline__ Further<Chunk, kPieces> further(Ranks) const {
    return {};
  }
  template <class Chunk, int kPieces>
  __device__ __forceinline__ void load(Further<Chunk, kPieces>&, int, std::int64_t) const {}
  /// The result. `own` is the sum of this launch.
  template <class Element, class Chunk>
  __device__ __forceinline__ Chunk add(const Others<Chunk>&, Ranks, std::int64_t,
                                       const Chunk& own) const {
    return own;
  }
  template <class Element, class Chunk, int kPieces>
  __device__ __forceinline__ Chunk add(const Others<Chunk>&, Ranks, std::int64_t, const Chunk& own,
                                       const Further<Chunk, kPieces>&, int) const {
    return own;
  }
};
struct SumOverRanks {
  RankSums sums;
  using Ranks = TokenRanks;
  template <class Chunk>
  using Others = OtherSums<Chunk>;
  template <class Chunk, int kPieces>
  using Further = FurtherSums<Chunk, kPieces>;

  __device__ __forceinline__ Ranks ranks_of(std::int64_t token) const {
    return {static_cast<std::uint32_t>(token), first_other(sums, mask_of(sums, token))};
  }
  __device__ __forceinline__ bool fault() const {
    return *static_cast<const volatile std::uint32_t*>(sums.fault) != 0;
  }
  template <class Chunk>
  __device__ __forceinline__ Others<Chunk> load(const Ranks& ranks, std::int64_t at) const {
    Others<Chunk> others;
    others.load_first(sums, ranks, at);
    return others;
  }
  template <class Element, class Chunk>
  __device__ __forceinline__ Chunk add(const Others<Chunk>& others, const Ranks& ranks,
                                       std::int64_t at, const Chunk& own) const {
    return others.template add<Element>(sums, ranks, at, own);
  }
  template <class Chunk, int kPieces>
  __device__ __forceinline__ Further<Chunk, kPieces> further(const Ranks& ranks) const {
    return {sums, ranks};
  }
  template <class Chunk, int kPieces>
  __device__ __forceinline__ void load(Further<Chunk, kPieces>& further, int piece,
                                       std::int64_t at) const {
    further.load(sums, piece, at);
  }
  template <class Element, class Chunk, int kPieces>
  __device__ __forceinline__ Chunk add(const Others<Chunk>& others, const Ranks& ranks,
                                       std::int64_t at, const Chunk& own,
                                       const Further<Chunk, kPieces>& further, int piece) const {
    return others.template add<Element>(sums, ranks, at, own, further, piece);
  }
};

}  // namespace sonicmoe::cuda
