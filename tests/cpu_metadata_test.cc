// The CPU's stable sort of rows against a simple sort.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <vector>

#include "cpu/metadata.h"

namespace sonicmoe::cpu {
namespace {

struct Source {
  std::int64_t expert;
  std::int64_t token;
  std::int64_t slot;
};

void expect_sorted(const Problem& p, const Routing& routing, std::vector<Source> sources) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(metadata_bytes(p)), 0xff);
  const Metadata m = metadata_at(p, bytes.data());
  build_metadata(p, routing, m);

  std::stable_sort(sources.begin(), sources.end(), [](const Source& a, const Source& b) {
    return std::tie(a.expert, a.token, a.slot) < std::tie(b.expert, b.token, b.slot);
  });
  ASSERT_EQ(m.offsets[0], 0);
  ASSERT_EQ(m.offsets[p.experts], std::ssize(sources));
  for (std::int64_t e = 0; e < p.experts; ++e) {
    const auto count = std::count_if(sources.begin(), sources.end(),
                                     [&](const Source& s) { return s.expert == e; });
    ASSERT_EQ(m.offsets[e + 1] - m.offsets[e], count) << "expert " << e;
  }
  for (std::size_t r = 0; r < sources.size(); ++r) {
    ASSERT_EQ(m.row_token[r], sources[r].token) << "row " << r;
    ASSERT_EQ(m.row_source[r], sources[r].slot) << "row " << r;
  }
  ASSERT_EQ(m.token_offsets[0], 0);
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    std::vector<std::pair<std::int64_t, std::int32_t>> own;  // slot, row
    for (std::size_t r = 0; r < sources.size(); ++r) {
      if (sources[r].token == t) own.emplace_back(sources[r].slot, static_cast<std::int32_t>(r));
    }
    std::sort(own.begin(), own.end());
    ASSERT_EQ(m.token_offsets[t + 1] - m.token_offsets[t], std::ssize(own)) << "token " << t;
    for (std::size_t i = 0; i < own.size(); ++i) {
      ASSERT_EQ(m.token_rows[m.token_offsets[t] + static_cast<std::int32_t>(i)], own[i].second);
    }
  }
}

Problem problem_of(RoutingForm form, std::int64_t tokens, std::int64_t experts) {
  Problem p{.tokens = tokens, .hidden = 4, .width = 4, .experts = experts};
  p.form = form;
  return p;
}

bool inside(std::int64_t v, std::int64_t end) { return v >= 0 && v < end; }

TEST(CpuMetadata, IdsWithRepeatsSentinelsAndAliases) {
  std::mt19937_64 engine(1);
  for (const std::int64_t tokens : {0, 1, 2, 63, 200}) {
    for (const std::int64_t experts : {1, 5, 64}) {
      for (const std::int64_t k : {1, 3, 8}) {
        Problem p = problem_of(RoutingForm::kIds, tokens, experts);
        p.top_k = k;
        std::uniform_int_distribution<std::int64_t> any(-2, experts + 1);
        std::vector<std::int64_t> ids(static_cast<std::size_t>(tokens * k));
        for (auto& id : ids) id = any(engine);
        if (!ids.empty()) ids.back() = (std::int64_t{1} << 32);  // expert 0 in 32 bits
        std::vector<Source> sources;
        for (std::int64_t s = 0; s < tokens * k; ++s) {
          if (inside(ids[s], experts)) sources.push_back({ids[s], s / k, s});
        }
        Routing routing;
        routing.ids = tensor2(ids.data(), DType::kI64, tokens, k);
        expect_sorted(p, routing, sources);
      }
    }
  }
}

TEST(CpuMetadata, PairsInAnyOrder) {
  std::mt19937_64 engine(2);
  for (const std::int64_t count : {0, 1, 7, 500}) {
    Problem p = problem_of(RoutingForm::kPairs, 40, 6);
    p.capacity = count;
    std::uniform_int_distribution<std::int32_t> any_token(-1, 40);
    std::uniform_int_distribution<std::int32_t> any_expert(-1, 6);
    std::vector<std::int32_t> token(static_cast<std::size_t>(count));
    std::vector<std::int32_t> expert(static_cast<std::size_t>(count));
    std::vector<Source> sources;
    for (std::int64_t s = 0; s < count; ++s) {
      token[s] = any_token(engine);
      expert[s] = any_expert(engine);
      if (inside(token[s], 40) && inside(expert[s], 6)) sources.push_back({expert[s], token[s], s});
    }
    Routing routing;
    routing.token = tensor1(token.data(), DType::kI32, count);
    routing.expert = tensor1(expert.data(), DType::kI32, count);
    expect_sorted(p, routing, sources);
  }
}

TEST(CpuMetadata, GroupsAreClampedAndMayLeaveGaps) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  std::vector<std::int64_t> begin = {-3, 20, 12, 5, -kHuge, 28};
  std::vector<std::int64_t> count = {5, 4, 0, 3, kHuge, kHuge};
  const Problem p = problem_of(RoutingForm::kGrouped, 30, 6);
  std::vector<Source> sources;
  for (const auto& [e, first, last] : {std::tuple{0, 0, 2}, {1, 20, 24}, {3, 5, 8}, {5, 28, 30}}) {
    for (std::int64_t t = first; t < last; ++t) sources.push_back({e, t, t});
  }
  Routing routing;
  routing.row_begin = tensor1(begin.data(), DType::kI64, 6);
  routing.row_count = tensor1(count.data(), DType::kI64, 6);
  expect_sorted(p, routing, sources);
}

TEST(CpuMetadata, KeepsWhatItPromises) {
  Problem p = problem_of(RoutingForm::kIds, 1'000'000, 128);
  p.top_k = 8;
  EXPECT_LE(metadata_bytes(p), 20 * 8'000'000 + 16 * 1'000'000 + 1024 * 128);
}

}  // namespace
}  // namespace sonicmoe::cpu
