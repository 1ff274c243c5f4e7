// Lists of pairs: sorted by (expert, token), then empty entries up to the capacity.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/routing_access.h"
#include "sonicmoe/routing.h"

namespace sonicmoe::cpu {

/// Writes empty entries (token -1, expert E, weight 0) to [first, C).
template <class Real>
void close_pairs(const Pairs& pairs, std::int64_t first, std::int64_t experts) {
  for (std::int64_t i = first; i < pairs.token.shape[0]; ++i) {
    element<std::int32_t>(pairs.token, i) = -1;
    element<std::int32_t>(pairs.expert, i) = static_cast<std::int32_t>(experts);
    element<Real>(pairs.weight, i) = Real{0};
  }
}

/// The pairs of each token, in ascending order of their index in the list.
class PairsByToken {
 public:
  PairsByToken(const Pairs& pairs, std::int64_t tokens, std::int64_t experts)
      : begin_(tokens + 1, 0) {
    const std::int64_t capacity = pairs.token.shape[0];
    const auto valid = [&](std::int64_t i) {
      const std::int32_t t = element<std::int32_t>(pairs.token, i);
      const std::int32_t e = element<std::int32_t>(pairs.expert, i);
      return t >= 0 && t < tokens && e >= 0 && e < experts;
    };
    for (std::int64_t i = 0; i < capacity; ++i) {
      if (valid(i)) ++begin_[element<std::int32_t>(pairs.token, i) + 1];
    }
    for (std::int64_t t = 0; t < tokens; ++t) begin_[t + 1] += begin_[t];
    index_.resize(begin_[tokens]);
    std::vector<std::int64_t> next(begin_.begin(), begin_.end() - 1);
    for (std::int64_t i = 0; i < capacity; ++i) {
      if (valid(i)) index_[next[element<std::int32_t>(pairs.token, i)]++] = i;
    }
  }

  const std::int64_t* begin(std::int64_t t) const { return index_.data() + begin_[t]; }
  const std::int64_t* end(std::int64_t t) const { return index_.data() + begin_[t + 1]; }

 private:
  std::vector<std::int64_t> begin_;
  std::vector<std::int64_t> index_;
};

}  // namespace sonicmoe::cpu
