#include "verify/routings.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>

namespace sonicmoe::verify {
namespace {

using Values = std::vector<std::int64_t>;
using Engine = std::mt19937_64;

constexpr std::int64_t kInt32Min = std::numeric_limits<std::int32_t>::min();
constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kInt64Max = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kTwo32 = std::int64_t{1} << 32;

std::int64_t below(Engine& engine, std::int64_t end) {
  return std::uniform_int_distribution<std::int64_t>(0, end - 1)(engine);
}

Values distinct_ids(const Problem& p, Engine& engine) {
  Values ids, experts(static_cast<std::size_t>(p.experts));
  std::iota(experts.begin(), experts.end(), 0);
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    std::shuffle(experts.begin(), experts.end(), engine);
    ids.insert(ids.end(), experts.begin(), experts.begin() + p.top_k);
  }
  return ids;
}

Values ids_of(const Case& c, Engine& engine) {
  const Problem& p = c.problem;
  const auto slots = static_cast<std::size_t>(p.tokens * p.top_k);
  if (c.pattern == Pattern::kDistinct) return distinct_ids(p, engine);
  Values ids(slots, -1);
  if (c.pattern == Pattern::kEmpty) return ids;
  if (c.pattern == Pattern::kCounts) {
    std::size_t slot = 0;
    for (std::size_t e = 0; e < c.counts.size(); ++e) {
      for (std::int64_t i = 0; i < c.counts[e]; ++i) ids.at(slot++) = static_cast<std::int64_t>(e);
    }
    std::shuffle(ids.begin(), ids.end(), engine);
    return ids;
  }
  for (std::int64_t& id : ids) id = below(engine, p.experts);
  if (c.pattern == Pattern::kHot) {
    for (std::size_t slot = 0; slot < slots; slot += static_cast<std::size_t>(p.top_k))
      ids[slot] = 0;
  }
  const Values outside =
      c.pattern == Pattern::kSentinels ? Values{-1, p.experts, kInt32Min, kInt32Max, -p.experts}
      : c.pattern == Pattern::kAliases ? Values{kTwo32, kTwo32 + 1, -kTwo32, 5 * kTwo32, kInt64Max}
                                       : Values{};
  for (std::size_t slot = 0; !outside.empty() && slot < slots; slot += 1 + engine() % 5) {
    ids[slot] = outside[engine() % outside.size()];
  }
  return ids;
}

void fill_pairs(const Case& c, Engine& engine, Indices& out) {
  const Problem& p = c.problem;
  const auto capacity = static_cast<std::size_t>(p.capacity);
  if (c.pattern == Pattern::kEmpty || p.tokens == 0) {
    out.token.assign(capacity, -1);
    out.expert.assign(capacity, p.experts);
    return;
  }
  for (std::size_t i = 0; i < capacity; ++i) {
    // Squared random numbers: low tokens get many pairs, others none.
    const std::int64_t t = below(engine, p.tokens);
    out.token.push_back(t * t / p.tokens);
    out.expert.push_back(below(engine, p.experts));
  }
  if (c.pattern == Pattern::kShuffled) {
    for (std::size_t i = 3; i < capacity; i += 7) (i % 2 == 0 ? out.token[i] : out.expert[i]) = -1;
    for (std::size_t i = 5; i < capacity; i += 11) {
      if (i % 2 == 0) {
        out.token[i] = p.tokens;
      } else {
        out.expert[i] = p.experts;
      }
    }
    return;
  }
  std::vector<std::pair<std::int64_t, std::int64_t>> pairs;
  for (std::size_t i = 0; i < capacity - capacity / 4; ++i) {
    pairs.emplace_back(out.expert[i], out.token[i]);
  }
  std::sort(pairs.begin(), pairs.end());
  pairs.resize(capacity, {p.experts, -1});
  for (std::size_t i = 0; i < capacity; ++i) std::tie(out.expert[i], out.token[i]) = pairs[i];
}

void fill_groups(const Case& c, Indices& out) {
  const std::int64_t experts = c.problem.experts;
  const std::int64_t tokens = c.problem.tokens;
  out.row_begin.assign(static_cast<std::size_t>(experts), 0);
  out.row_count.assign(static_cast<std::size_t>(experts), 0);
  if (c.pattern == Pattern::kEmpty) return;
  if (c.pattern == Pattern::kOverlong) {
    // Ranges across the begin, inside, with a negative count, past the end, and across the end.
    const std::int64_t third = tokens / 3;
    const std::int64_t huge = c.index_dtype == DType::kI64 ? kInt64Max : kInt32Max;
    const Values begin = {-5, third, 2 * third, tokens + 3, 2 * third};
    const Values count = {third + 5, third - 2, -7, huge, huge};
    for (std::int64_t e = 0; e < std::min<std::int64_t>(experts, 5); ++e) {
      out.row_begin[e] = begin[e];
      out.row_count[e] = count[e];
    }
    return;
  }
  std::int64_t next = 0;
  for (std::int64_t i = 0; i < experts; ++i) {
    const bool gaps = c.pattern == Pattern::kGaps;
    const std::int64_t e = gaps ? experts - 1 - i : i;
    out.row_begin[e] = next;
    out.row_count[e] = c.counts.at(static_cast<std::size_t>(e));
    next += out.row_count[e];
    if (gaps) next = (next + 16) / 16 * 16;
  }
}

}  // namespace

Indices make_indices(const Case& c) {
  const Problem& p = c.problem;
  Engine engine(static_cast<std::uint64_t>(p.tokens * 1000003 + p.experts * 1009 + p.top_k));
  Indices out;
  switch (p.form) {
    case RoutingForm::kIds:
      out.ids = ids_of(c, engine);
      break;
    case RoutingForm::kPairs:
      fill_pairs(c, engine, out);
      break;
    case RoutingForm::kGrouped:
      fill_groups(c, out);
      break;
  }
  return out;
}

}  // namespace sonicmoe::verify
