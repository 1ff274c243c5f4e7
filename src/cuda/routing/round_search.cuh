// The first m of one expert's tokens in the order of rounding, among those that top-k chose or
// among the others: radix selection over integers, so no order of events matters.
#pragma once

#include "cuda/routing/block.cuh"
#include "cuda/routing/round_marks.cuh"

namespace sonicmoe::cuda {

inline constexpr int kSearchThreads = 512;  // two blocks fit one multiprocessor

/// Who is searched: the tokens that were not chosen, from the best, or those that were, from the
/// worst.
enum class Side { kOthers, kChosen };

/// A token's place in the order of a side, the larger the earlier it is found: p, then the lower
/// token; turned over for the chosen. No two are equal.
struct TokenOrder {
  static constexpr int kTokenBits = 31;
  static constexpr int kBits = kTokenBits + 30;  // p is at most 1
  static constexpr std::uint64_t kAll = (std::uint64_t{1} << kBits) - 1;
  static constexpr std::uint32_t kTokens = (std::uint32_t{1} << kTokenBits) - 1;

  static __device__ std::uint64_t of(Side side, float p, int token) {
    const std::uint64_t order = static_cast<std::uint64_t>(key::bits_of(p)) << kTokenBits |
                                (static_cast<std::uint32_t>(token) ^ kTokens);
    return side == Side::kOthers ? order : order ^ kAll;
  }
  static __device__ int token(Side side, std::uint64_t order) {
    const auto low = static_cast<std::uint32_t>(order) & kTokens;
    return static_cast<int>(side == Side::kOthers ? low ^ kTokens : low);
  }
  /// As tiles have it, turned for the chosen.
  static __device__ unsigned cut(std::uint64_t order) {
    return static_cast<unsigned>(order >> (kBits - kCutBits));
  }
  static __device__ float p(Side side, std::uint64_t order) {
    const std::uint64_t up = side == Side::kOthers ? order : order ^ kAll;
    return key::float_of(static_cast<std::uint32_t>(up >> kTokenBits));
  }
};

/// One expert's tokens.
struct ExpertTokens {
  const TileMarks* marks;  // (tiles)
  PairScores scores;
  int expert;
  int tokens;

  __device__ int tiles() const { return (tokens + kTileTokens - 1) / kTileTokens; }
  __device__ bool is_chosen(int token) const {
    return (marks[token / kTileTokens].chosen >> token % kTileTokens & 1) != 0;
  }
};

/// Shared memory of a search.
struct SearchRoom {
  static constexpr int kBinBits = 11;
  static constexpr int kBins = 1 << kBinBits;
  static constexpr int kMost = 2048;

  unsigned bins[kBins];
  int places[kMost];            // where to look: groups
  std::uint64_t orders[kMost];  // what was found there
  int listed;
  int stored;
  std::uint64_t last;
};

/// One digit of a value that is looked for.
struct Digit {
  int bin;    // -1: there are fewer values
  int rank;   // its place from the top among those that share the digit, from 1
  int count;  // how many share it
};

/// The digit of the m-th largest value: `visit(add)` calls add(digit) for every value, in any
/// order, from any thread.
template <class Visit>
__device__ Digit find_digit(unsigned* bins, int m, const Visit& visit) {
  constexpr int kPerThread = SearchRoom::kBins / kSearchThreads;
  __shared__ Digit found;
#pragma unroll
  for (int b = 0; b < kPerThread; b++) bins[b * kSearchThreads + threadIdx.x] = 0;
  if (threadIdx.x == 0) found.bin = -1;
  __syncthreads();
  visit([&](unsigned digit) { atomicAdd(&bins[digit], 1u); });
  __syncthreads();
  // Thread i counts from the top, kPerThread bins from kBins - 1 - i * kPerThread downwards.
  const int last = SearchRoom::kBins - kPerThread * (static_cast<int>(threadIdx.x) + 1);
  const uint4 four = *reinterpret_cast<const uint4*>(bins + last);
  static_assert(kPerThread == 4);
  const int counts[kPerThread] = {static_cast<int>(four.w), static_cast<int>(four.z),
                                  static_cast<int>(four.y), static_cast<int>(four.x)};
  const int own = counts[0] + counts[1] + counts[2] + counts[3];
  int total = 0;
  int before = block_prefix<kSearchThreads>(own, &total);
  if (before < m && m <= before + own) {
#pragma unroll
    for (int b = 0; b < kPerThread; b++) {
      if (before < m && m <= before + counts[b]) {
        found = {last + kPerThread - 1 - b, m - before, counts[b]};
      }
      before += counts[b];
    }
  }
  __syncthreads();
  const Digit result = found;
  __syncthreads();
  return result;
}

/// Looks for the first m of a side. All threads of the block call everything together.
class TokenSearch {
 public:
  __device__ TokenSearch(const ExpertTokens& x, Side side, int m, SearchRoom* room)
      : x_(x), side_(side), room_(room) {
    __syncthreads();  // a search before this one is over
    if (threadIdx.x == 0) room->listed = room->stored = 0;
    list_groups(m);
    evaluate([&](std::uint64_t order) {
      const int at = atomicAdd(&room->stored, 1);
      if (at < SearchRoom::kMost) room->orders[at] = order;
    });
    __syncthreads();
  }

  /// The order of the m-th, or what lies between it and the next.
  __device__ std::uint64_t last(int m) const {
    return room_->stored <= kFew ? last_of_few(m) : last_of_many(m);
  }

  /// Calls body(order) for all that may be among the first m, in no order.
  template <class Body>
  __device__ void each(const Body& body) const {
    if (room_->stored > SearchRoom::kMost) {
      evaluate(body);
      return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < room_->stored; i += kSearchThreads) body(room_->orders[i]);
  }

 private:
  static constexpr int kCutShift = kCutBits - SearchRoom::kBinBits;
  static constexpr int kFew = 128;
  static constexpr int kParts = 4;  // lanes that compare one with all others

  /// Groups whose best is not below the m-th best of all groups: no other can have one of the m
  /// first.
  __device__ void list_groups(int m) {
    const Digit digit = find_digit(room_->bins, m, [&](const auto& add) {
      each_group([&](int, unsigned best) {
        if (best != 0) add(best >> kCutShift);
      });
    });
    floor_ = digit.bin < 0 ? 0 : static_cast<unsigned>(digit.bin) << kCutShift;
    const unsigned least = side_ == Side::kOthers ? floor_ : max(floor_, 1u);  // 0: nobody chose
    each_group([&](int group, unsigned best) {
      if (best < least) return;
      const int at = atomicAdd(&room_->listed, 1);
      if (at < SearchRoom::kMost) room_->places[at] = group;
    });
    __syncthreads();
  }
  template <class Body>
  __device__ void each_group(const Body& body) const {
    for (int tile = threadIdx.x; tile < x_.tiles(); tile += kSearchThreads) {
      const TileMarks& marks = x_.marks[tile];
      const std::uint64_t four = *reinterpret_cast<const std::uint64_t*>(
          side_ == Side::kOthers ? marks.best : marks.worst);
#pragma unroll
      for (int g = 0; g < kTileGroups; g++) {
        body(tile * kTileGroups + g, static_cast<unsigned>(four >> 16 * g) & 0xffff);
      }
    }
  }

  /// The same as each(), from the logits. Where the groups do not fit their list, all tokens are
  /// looked at.
  template <class Body>
  __device__ void evaluate(const Body& body) const {
    constexpr int kAtOnce = 4;  // so that their reads overlap
    const bool listed = room_->listed <= SearchRoom::kMost;
    const int count = listed ? room_->listed * kGroupTokens : x_.tokens;
#pragma unroll 1
    for (int first = threadIdx.x; first < count; first += kAtOnce * kSearchThreads) {
      int token[kAtOnce];
      float p[kAtOnce];
      bool wanted[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const int at = first + i * kSearchThreads;
        const int place = at < count ? at : first;
        token[i] = listed
                       ? room_->places[place / kGroupTokens] * kGroupTokens + place % kGroupTokens
                       : place;
        wanted[i] = at < count && token[i] < x_.tokens;
        token[i] = min(token[i], x_.tokens - 1);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        wanted[i] = wanted[i] && x_.is_chosen(token[i]) == (side_ == Side::kChosen);
        p[i] = x_.scores.p(token[i], x_.expert);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const std::uint64_t order = TokenOrder::of(side_, p[i], token[i]);
        if (wanted[i] && TokenOrder::cut(order) >= floor_) body(order);
      }
    }
  }

  /// By counting who comes before.
  __device__ std::uint64_t last_of_few(int m) const {
    const int part = threadIdx.x % kParts;
    const int count = room_->stored;
    for (int first = 0; first < count; first += kSearchThreads / kParts) {
      const int i = first + static_cast<int>(threadIdx.x) / kParts;
      const std::uint64_t own = room_->orders[min(i, count - 1)];
      int before = 0;
#pragma unroll 4
      for (int j = part; j < count; j += kParts) before += room_->orders[j] > own ? 1 : 0;
      for (int d = 1; d < kParts; d *= 2) before += __shfl_xor_sync(kAllLanes, before, d);
      if (i < count && before == m - 1) room_->last = own;
    }
    __syncthreads();
    return room_->last;
  }
  __device__ std::uint64_t last_of_many(int m) const {
    std::uint64_t value = 0;
    int top = TokenOrder::kBits;
    while (top > 0) {
      const int bits = min(SearchRoom::kBinBits, top);
      const int shift = top - bits;
      const Digit digit = find_digit(room_->bins, m, [&](const auto& add) {
        each([&](std::uint64_t order) {
          if (order >> top != value >> top) return;
          add(static_cast<unsigned>(order >> shift) & ((1u << bits) - 1));
        });
      });
      value |= static_cast<std::uint64_t>(digit.bin) << shift;
      if (digit.count == digit.rank) break;
      m = digit.rank;
      top = shift;
    }
    return value;
  }

  const ExpertTokens& x_;
  Side side_;
  SearchRoom* room_;
  unsigned floor_ = 0;
};

}  // namespace sonicmoe::cuda
