// Finds the first m of one expert's tokens in the order of rounding, among those that top-k chose
// or among the others. Radix selection over integers: the result does not depend on timing.
#pragma once

#include "cuda/metadata/block.cuh"
#include "cuda/routing/round_marks.cuh"

namespace sonicmoe::cuda {

inline constexpr int kSearchThreads = 512;  // two blocks fit one multiprocessor

/// The tokens that are searched: those that top-k did not choose, from the best p on, or those that
/// it chose, from the worst p on.
enum class Side { kOthers, kChosen };

/// A token's key in the order of a side; larger keys come first. The key is p (key::rank_of), then
/// the inverted token number (the lower token first); for chosen tokens all bits are inverted. No
/// two keys are equal.
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
  /// The cut, as TileMarks has it: inverted for chosen tokens.
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

  __device__ int tiles() const {
    return static_cast<int>((std::int64_t{tokens} + kTileTokens - 1) / kTileTokens);
  }
  __device__ bool is_chosen(int token) const {
    return (marks[token / kTileTokens].chosen >> token % kTileTokens & 1) != 0;
  }
};

/// Shared memory of a search.
struct SearchSmem {
  static constexpr int kBinBits = 11;
  static constexpr int kBins = 1 << kBinBits;
  static constexpr int kMost = 2048;

  unsigned bins[kBins];
  int groups[kMost];            // groups to look into
  std::uint64_t orders[kMost];  // keys of tokens that were found there
  int listed;
  int stored;
  std::uint64_t last;
};

/// One digit of the value that is searched.
struct Digit {
  int bin;    // -1: there are fewer values
  int rank;   // rank from the top among the values with this digit, from 1
  int count;  // values with this digit
};

/// The digit of the m-th largest value: `visit(add)` calls add(digit) for every value, in any
/// order, from any thread.
template <class Visit>
__device__ Digit find_digit(unsigned* bins, int m, const Visit& visit) {
  constexpr int kPerThread = SearchSmem::kBins / kSearchThreads;
  __shared__ Digit found;
#pragma unroll
  for (int b = 0; b < kPerThread; b++) bins[b * kSearchThreads + threadIdx.x] = 0;
  if (threadIdx.x == 0) found.bin = -1;
  __syncthreads();
  visit([&](unsigned digit) { atomicAdd(&bins[digit], 1u); });
  __syncthreads();
  // Thread i counts from the top, kPerThread bins from kBins - 1 - i * kPerThread downwards.
  const int last = SearchSmem::kBins - kPerThread * (static_cast<int>(threadIdx.x) + 1);
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

/// Searches the first m tokens of a side. All threads of the block call every function together.
class TokenSearch {
 public:
  __device__ TokenSearch(const ExpertTokens& x, Side side, int m, SearchSmem* smem)
      : x_(x), side_(side), smem_(smem) {
    __syncthreads();  // all threads have left the search before this one
    if (threadIdx.x == 0) smem->listed = smem->stored = 0;
    list_groups(m);
    evaluate([&](std::uint64_t order) {
      const int at = atomicAdd(&smem->stored, 1);
      if (at < SearchSmem::kMost) smem->orders[at] = order;
    });
    __syncthreads();
  }

  /// The key of the m-th token, or a value between it and the next key.
  __device__ std::uint64_t last(int m) const {
    return smem_->stored <= kFew ? last_of_few(m) : last_of_many(m);
  }

  /// Calls body(key) for all tokens that may be among the first m, in no order.
  template <class Body>
  __device__ void each(const Body& body) const {
    if (smem_->stored > SearchSmem::kMost) {
      evaluate(body);
      return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < smem_->stored; i += kSearchThreads) body(smem_->orders[i]);
  }

 private:
  static constexpr int kCutShift = kCutBits - SearchSmem::kBinBits;
  static constexpr int kFew = 128;
  static constexpr int kParts = 4;  // lanes that compare one with all others

  /// Lists the groups whose best cut is not below the m-th best of all groups. No other group can
  /// have one of the first m tokens.
  __device__ void list_groups(int m) {
    const Digit digit = find_digit(smem_->bins, m, [&](const auto& add) {
      each_group([&](int, unsigned best) {
        if (best != 0) add(best >> kCutShift);
      });
    });
    floor_ = digit.bin < 0 ? 0 : static_cast<unsigned>(digit.bin) << kCutShift;
    const unsigned least = side_ == Side::kOthers ? floor_ : max(floor_, 1u);  // 0: no token chose
    each_group([&](int group, unsigned best) {
      if (best < least) return;
      const int at = atomicAdd(&smem_->listed, 1);
      if (at < SearchSmem::kMost) smem_->groups[at] = group;
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

  /// As each(), from the logits. If the groups did not fit their list, it visits all tokens.
  template <class Body>
  __device__ void evaluate(const Body& body) const {
    constexpr int kAtOnce = 4;  // tokens whose loads overlap
    const bool listed = smem_->listed <= SearchSmem::kMost;
    // Unsigned: an index past 2^31 - 1 tokens must not overflow.
    const unsigned count = listed ? smem_->listed * kGroupTokens : x_.tokens;
#pragma unroll 1
    for (unsigned first = threadIdx.x; first < count; first += kAtOnce * kSearchThreads) {
      int token[kAtOnce];
      float p[kAtOnce];
      bool wanted[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const unsigned at = first + i * kSearchThreads;
        const int i_th = static_cast<int>(at < count ? at : first);
        token[i] =
            listed ? smem_->groups[i_th / kGroupTokens] * kGroupTokens + i_th % kGroupTokens : i_th;
        wanted[i] = at < count && token[i] < x_.tokens;
        token[i] = min(token[i], x_.tokens - 1);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        wanted[i] = wanted[i] && x_.is_chosen(token[i]) == (side_ == Side::kChosen);
        p[i] = x_.scores.rank(token[i], x_.expert);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const std::uint64_t order = TokenOrder::of(side_, p[i], token[i]);
        if (wanted[i] && TokenOrder::cut(order) >= floor_) body(order);
      }
    }
  }

  /// Counts for every key the keys that come before it.
  __device__ std::uint64_t last_of_few(int m) const {
    const int part = threadIdx.x % kParts;
    const int count = smem_->stored;
    for (int first = 0; first < count; first += kSearchThreads / kParts) {
      const int i = first + static_cast<int>(threadIdx.x) / kParts;
      const std::uint64_t own = smem_->orders[min(i, count - 1)];
      int before = 0;
#pragma unroll 4
      for (int j = part; j < count; j += kParts) before += smem_->orders[j] > own ? 1 : 0;
      for (int d = 1; d < kParts; d *= 2) before += __shfl_xor_sync(kAllLanes, before, d);
      if (i < count && before == m - 1) smem_->last = own;
    }
    __syncthreads();
    return smem_->last;
  }
  /// Finds the key digit by digit. If the m-th key is the smallest one with the digits that are
  /// found so far, the other digits may stay 0: the result is then between this key and the next
  /// one.
  __device__ std::uint64_t last_of_many(int m) const {
    std::uint64_t value = 0;
    int top = TokenOrder::kBits;
    while (top > 0) {
      const int bits = min(SearchSmem::kBinBits, top);
      const int shift = top - bits;
      const Digit digit = find_digit(smem_->bins, m, [&](const auto& add) {
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
  SearchSmem* smem_;
  unsigned floor_ = 0;
};

}  // namespace sonicmoe::cuda
