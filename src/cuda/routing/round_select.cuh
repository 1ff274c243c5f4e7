// The best c of one expert's rank keys: radix selection over integers, so no order of events
// matters.
#pragma once

#include <cuda_pipeline.h>

#include <cstdint>

#include "cuda/routing/block.cuh"
#include "cuda/routing/round_keys.cuh"

namespace sonicmoe::cuda {

inline constexpr int kSelectThreads = 512;  // two blocks fit one multiprocessor

/// What an expert keeps: cut keys above `cut`, those that equal it if the bits below are above
/// `low`, and the first `take` tokens that equal both.
struct Threshold {
  std::uint32_t cut;
  std::uint32_t low;
  std::int32_t take;
  std::int32_t ties;  ///< 1: more tokens equal both than are taken; 0: all of them are
  std::int32_t rows;  ///< c

  /// Whether nobody has to look below the cut.
  __device__ bool is_coarse() const { return low == 0 && ties == 0; }
};

/// Which tokens are searched: those that were not chosen, from the best, or those that were, from
/// the worst. Turned, the keys of that side have the upper bit and are the larger the earlier they
/// are found.
struct Side {
  unsigned turn;

  static __device__ Side others() { return {kCutChosen}; }
  static __device__ Side chosen() { return {kCutMask}; }
  __device__ unsigned turned(unsigned key) const { return key ^ turn; }
  __device__ unsigned two_turned(unsigned keys) const { return keys ^ (turn << 16 | turn); }
  /// Of the bits below the upper one, or of those below the cut.
  __device__ unsigned value(unsigned bits) const { return (bits ^ turn) & kCutMask; }
  __device__ unsigned key(unsigned value) const { return (kCutChosen | value) ^ turn; }
};

/// Cut rank keys of an expert, in global memory or staged in shared memory, where they are read
/// many times.
class Column {
 public:
  static constexpr int kChunk = kSelectThreads * 4;
  static constexpr int kStretchChunks = 8;  // what is put in order together
  static constexpr int kStretch = kChunk * kStretchChunks;
  /// Tokens of a column that fits shared memory beside a list of a stretch.
  static constexpr int kMostStaged = 80 * 1024;

  __device__ Column(const CutKey* keys, int tokens) : keys_(keys), tokens_(tokens) {}

  /// Bytes of shared memory that stage() takes; 0 where the column does not fit.
  static std::size_t staged_bytes(std::int64_t tokens) {
    return tokens <= kMostStaged ? static_cast<std::size_t>(key_stride_of(tokens)) * 2 : 0;
  }
  /// A copy in `room`, or the column itself where it does not fit. Not to be read before
  /// wait_for_copy(), which the whole block calls.
  static __device__ Column stage(const CutKey* keys, int tokens, CutKey* room) {
    if (tokens > kMostStaged) return {keys, tokens};
#pragma unroll 4
    for (int at = static_cast<int>(threadIdx.x) * 8; at < tokens; at += kSelectThreads * 8) {
      __pipeline_memcpy_async(room + at, keys + at, 16);
    }
    __pipeline_commit();
    return {room, tokens};
  }
  static __device__ void wait_for_copy() {
    __pipeline_wait_prior(0);
    __syncthreads();
  }

  /// Where shared memory goes on behind a staged column.
  __device__ CutKey* end_of(CutKey* room) const {
    return keys_ == room ? room + (tokens_ + 7) / 8 * 8 : room;
  }

  __device__ int tokens() const { return tokens_; }
  __device__ unsigned key(int token) const { return keys_[token]; }

  /// This thread's four keys of the chunk that begins at `first`; keys past the last are kNone.
  __device__ uint4 read(int first) const {
    const int token = first + static_cast<int>(threadIdx.x) * 4;
    if (token >= tokens_) return {kNone, kNone, kNone, kNone};
    const uint2 words = *reinterpret_cast<const uint2*>(keys_ + token);
    uint4 four = {words.x & 0xffffu, words.x >> 16, words.y & 0xffffu, words.y >> 16};
    if (token + 1 >= tokens_) four.y = kNone;
    if (token + 2 >= tokens_) four.z = kNone;
    if (token + 3 >= tokens_) four.w = kNone;
    return four;
  }

  /// Calls body(key, token) for the tokens of a side whose turned key is `bound` or above, in no
  /// order. They are expected to be few: eight are passed over at once, and `body` stands once in
  /// the code.
  template <class Body>
  __device__ void from(const Side& side, unsigned bound, const Body& body) const {
#pragma unroll 1
    for (int token = static_cast<int>(threadIdx.x) * 8; token < tokens_;
         token += kSelectThreads * 8) {
      const uint4 keys = *reinterpret_cast<const uint4*>(keys_ + token);
      if (largest_of(side, keys) < bound) continue;
      for (int at = token; at < min(token + 8, tokens_); at++) {
        if (side.turned(key(at)) >= bound) body(key(at), at);
      }
    }
  }

  /// The largest value of this thread's tokens of a side, 0 where it has none.
  __device__ unsigned largest(const Side& side) const {
    unsigned best = 0;
#pragma unroll 2
    for (int token = static_cast<int>(threadIdx.x) * 8; token < tokens_;
         token += kSelectThreads * 8) {
      if (token + 8 <= tokens_) {
        best = max(best, largest_of(side, *reinterpret_cast<const uint4*>(keys_ + token)));
      } else {
        for (int at = token; at < tokens_; at++) best = max(best, side.turned(key(at)));
      }
    }
    return best >= kCutChosen ? best & kCutMask : 0;
  }

  /// No cut key: p is at most 1.
  static constexpr std::uint32_t kNone = 0xffffffffu;

 private:
  /// Of eight keys, turned.
  static __device__ unsigned largest_of(const Side& side, const uint4& keys) {
    const unsigned two = __vmaxu2(__vmaxu2(side.two_turned(keys.x), side.two_turned(keys.y)),
                                  __vmaxu2(side.two_turned(keys.z), side.two_turned(keys.w)));
    return max(two & 0xffffu, two >> 16);
  }

  const CutKey* keys_;
  int tokens_;
};

/// One of a set of 15-bit values, by its place from the top.
struct Selected {
  unsigned value;
  int rank;   // its place among those that equal it, from 1
  int count;  // how many equal it
};

/// Finds the m-th largest (m >= 1) of 15-bit values. Shared memory: kBins counters.
class RadixSelect {
 public:
  static constexpr int kBins = 2048;

  __device__ explicit RadixSelect(unsigned* bins) : bins_(bins) {}

  /// `visit(body)` calls body(value) for every value, in any order, from any thread.
  template <class Visit>
  __device__ Selected run(int m, const Visit& visit) const {
    return digits(m, visit, 0);
  }
  /// A value that the m-th largest is not below, and few others lie between: half the work.
  template <class Visit>
  __device__ unsigned bound(int m, const Visit& visit) const {
    return digits(m, visit, kSecondBits).value;
  }

 private:
  static constexpr int kFirstBits = 11;
  static constexpr int kSecondBits = kCutBits - kFirstBits;
  static_assert(1 << kFirstBits == kBins && kSecondBits <= kFirstBits);

  /// Down to the bit `last`.
  template <class Visit>
  __device__ Selected digits(int m, const Visit& visit, int last) const {
    Selected s{0, m, 0};
    int bits = kFirstBits;
#pragma unroll 1
    for (int shift = kSecondBits; shift >= last; shift -= kSecondBits) {
#pragma unroll 1
      for (int b = threadIdx.x; b < 1 << bits; b += kSelectThreads) bins_[b] = 0;
      __syncthreads();
      visit([&](unsigned value) {
        if (value >> (shift + bits) == s.value >> (shift + bits)) {
          atomicAdd(&bins_[value >> shift & ((1 << bits) - 1)], 1u);
        }
      });
      __syncthreads();
      take_digit(1 << bits, shift, &s);
      bits = kSecondBits;
    }
    return s;
  }

  __device__ void take_digit(int bins, int shift, Selected* s) const {
    constexpr int kPerThread = kBins / kSelectThreads;
    __shared__ int found[3];
    // Thread i counts from the top: bins - 1 - i * kPerThread downwards.
    const int top = bins - 1 - static_cast<int>(threadIdx.x) * kPerThread;
    int own = 0;
#pragma unroll
    for (int b = 0; b < kPerThread; b++) {
      own += b <= top ? static_cast<int>(bins_[top - b]) : 0;
    }
    int total = 0;
    int before = block_prefix<kSelectThreads>(own, &total);
    if (before < s->rank && s->rank <= before + own) {
      int b = top;
      while (before + static_cast<int>(bins_[b]) < s->rank) before += static_cast<int>(bins_[b--]);
      found[0] = b;
      found[1] = s->rank - before;
      found[2] = static_cast<int>(bins_[b]);
    }
    __syncthreads();
    s->value |= static_cast<unsigned>(found[0]) << shift;
    s->rank = found[1];
    s->count = found[2];
    __syncthreads();
  }

  unsigned* bins_;
};

/// Shared memory of a selection.
struct SelectRoom {
  static constexpr int kMostFound = RadixSelect::kBins / 2;
  union {
    unsigned bins[RadixSelect::kBins];
    std::uint64_t order[kMostFound];
  };
  int found[kMostFound];  // tokens
  int count;
};

/// A column, and p of its tokens where the cut keys are not enough.
struct Ranking {
  Column column;
  Probabilities probabilities;
  int expert;

  __device__ float p(int token) const { return probabilities.of(token, expert); }
};

/// Calls body(key, token) for the tokens of one side that may be among its m first: all that are
/// not below the m-th best of the best that each thread has.
class Candidates {
 public:
  __device__ Candidates(const Ranking& r, const Side& side, int m, SelectRoom* room)
      : ranking_(r), side_(side), room_(room) {
    if (threadIdx.x == 0) room->count = m <= kSelectThreads ? 0 : SelectRoom::kMostFound + 1;
    if (m <= kSelectThreads) find(m);
    __syncthreads();
  }

  template <class Body>
  __device__ void each(const Body& body) const {
    const int count = room_->count;
    if (count > SelectRoom::kMostFound) {
      ranking_.column.from(side_, kCutChosen | floor_, body);
      return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kSelectThreads) {
      body(ranking_.column.key(room_->found[i]), room_->found[i]);
    }
  }

 private:
  __device__ void find(int m) {
    const unsigned best = ranking_.column.largest(side_);
    floor_ = RadixSelect(room_->bins).bound(m, [&](const auto& body) { body(best); });
    ranking_.column.from(side_, kCutChosen | floor_, [&](unsigned, int token) {
      const int place = atomicAdd(&room_->count, 1);
      if (place < SelectRoom::kMostFound) room_->found[place] = token;
    });
  }

  const Ranking& ranking_;
  const Side& side_;
  SelectRoom* room_;
  unsigned floor_ = 0;
};

/// What keeps those whose chosen bit is set: no cut key lies between that of 1.0f and this.
__device__ inline Threshold keep_chosen(int c) { return {kCutChosen - 1, 0, 0, 0, c}; }

/// Turns the chosen bits of a staged column, `keys`, so that they tell its first c ranked, of which
/// f were chosen before. False, and nothing done, where too many would have to be looked at.
__device__ inline bool turn_bits(const Ranking& r, int c, int f, CutKey* keys, SelectRoom* room) {
  const bool more = c > f;
  const int m = more ? c - f : f - c;
  if (m == 0) return true;
  if (m > kSelectThreads) return false;
  const Side side = more ? Side::others() : Side::chosen();
  const Candidates candidates(r, side, m, room);
  const int count = room->count;
  if (count > SelectRoom::kMostFound) return false;
  // p, then the lower token, the larger the better; or all of it turned over.
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kSelectThreads) {
    const int token = room->found[i];
    const std::uint64_t rank = static_cast<std::uint64_t>(key::rank_key(r.p(token), 0)) << 32 |
                               ~static_cast<std::uint32_t>(token);
    room->order[i] = more ? rank : ~rank;
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kSelectThreads) {
    const std::uint64_t own = room->order[i];
    int before = 0;
#pragma unroll 4
    for (int j = 0; j < count; j++) before += room->order[j] > own ? 1 : 0;
    if (before < m) keys[room->found[i]] ^= kCutChosen;
  }
  __syncthreads();
  return true;
}

/// The first c ranked of a column in which f are chosen.
__device__ inline Threshold select_rows(const Ranking& r, int c, int f, SelectRoom* room) {
  if (c == f) return keep_chosen(c);
  if (c == 0) return {kCutChosen | kCutMask, 0, 0, 0, c};
  const bool more = c > f;
  const Side side = more ? Side::others() : Side::chosen();
  const int m = more ? c - f : f - c + 1;
  const Candidates candidates(r, side, m, room);
  const RadixSelect radix(room->bins);
  // Of those that equal the last one, from the best: how many are kept.
  const auto kept = [&](const Selected& s) { return more ? s.rank : s.count - s.rank + 1; };
  const Selected cut = radix.run(m, [&](const auto& body) {
    candidates.each([&](unsigned key, int) { body(side.value(key)); });
  });
  Threshold t{side.key(cut.value), 0, 0, 0, c};
  if (kept(cut) == cut.count) return t;
  const Selected low = radix.run(cut.rank, [&](const auto& body) {
    candidates.each([&](unsigned key, int token) {
      if (key == t.cut) body(side.value(low_key(r.p(token))));
    });
  });
  t.low = side.value(low.value);
  t.take = kept(low);
  t.ties = t.take < low.count ? 1 : 0;
  return t;
}

}  // namespace sonicmoe::cuda
