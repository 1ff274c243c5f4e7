// token_round(): every mode, any tile, against the naive second implementation, exactly.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <tuple>

#include "core/round_rule.h"
#include "cpu/backend.h"
#include "routing_reference.h"

namespace sonicmoe {
namespace {

using testing::Flavour;
using testing::Guarded;

constexpr RoundingMode kModes[] = {RoundingMode::kNearest,    RoundingMode::kUp,
                                   RoundingMode::kDown,       RoundingMode::kScore,
                                   RoundingMode::kStochastic, RoundingMode::kBalanced};
constexpr std::int64_t kTiles[] = {1, 2, 3, 16, 64, 128, 1000};

struct Shape {
  std::int64_t tokens, experts, top_k;
};
constexpr Shape kShapes[] = {{0, 3, 2},   {1, 1, 1},    {5, 3, 3},   {40, 7, 2},
                             {130, 8, 2}, {257, 16, 4}, {300, 2, 1}, {700, 5, 2}};

/// The outputs of one call.
struct Result {
  Guarded token, expert, weight, offsets;
  std::int64_t capacity, experts;

  Result(const RoundOptions& o, std::int64_t tokens, std::int64_t experts_, DType weight_dtype)
      : token(DType::kI32, round_capacity(o, tokens, experts_)),
        expert(DType::kI32, token.count()),
        weight(weight_dtype, token.count()),
        offsets(DType::kI64, experts_ + 1),
        capacity(token.count()),
        experts(experts_) {}
  Pairs pairs() { return {token.vector(), expert.vector(), weight.vector(), offsets.vector()}; }
  std::int64_t rows() { return static_cast<std::int64_t>(offsets.value(experts)); }
};

void round(const RoundOptions& o, Guarded* logits, Result* result, std::int64_t tokens,
           const Exec& exec = {}) {
  Guarded scratch(DType::kI64, cpu::round_scratch_bytes(o, tokens, result->experts, exec) / 8);
  cpu::token_round(o, logits->matrix(tokens, result->experts), result->pairs(), scratch.buffer(),
                   exec);
}

template <class Real>
void expect_reference(const RoundOptions& o, const Shape& s, DType dtype, Guarded* logits,
                      Result* got) {
  const auto x = testing::read_logits<Real>(logits, dtype, s.tokens, s.experts);
  const auto want = testing::round_tokens(o, x, static_cast<int>(s.experts));
  for (std::int64_t e = 0; e <= s.experts; ++e) {
    ASSERT_EQ(got->offsets.value(e), want.offsets[e]) << "offset " << e;
  }
  ASSERT_LE(got->rows(), got->capacity);
  for (std::int64_t i = 0; i < got->capacity; ++i) {
    const bool pair = i < got->rows();
    ASSERT_EQ(got->token.value(i), pair ? want.token[i] : -1) << i;
    ASSERT_EQ(got->expert.value(i), pair ? want.expert[i] : s.experts) << i;
    const double weight = pair ? want.weight[i] : 0.0;
    ASSERT_NEAR(got->weight.value(i), weight, dtype == DType::kF64 ? 1e-14 : 0.0) << i;
  }
}

// The properties of every correct result, checked without the reference.
void expect_invariants(const RoundOptions& o, const Shape& s, Guarded* logits, Result* got) {
  Guarded ids(DType::kI64, s.tokens * s.top_k);
  Guarded weights(got->weight.vector().dtype, s.tokens * s.top_k);
  cpu::route(o.route, logits->matrix(s.tokens, s.experts), ids.matrix(s.tokens, s.top_k),
             weights.matrix(s.tokens, s.top_k), {});
  std::set<std::pair<std::int64_t, std::int64_t>> chosen;  // (expert, token)
  std::vector<std::int64_t> count(s.experts, 0);
  for (std::int64_t i = 0; i < s.tokens * s.top_k; ++i) {
    const auto e = static_cast<std::int64_t>(ids.value(i));
    if (e < 0) continue;
    chosen.insert({e, i / s.top_k});
    ++count[e];
  }
  for (std::int64_t e = 0; e < s.experts; ++e) {
    const auto begin = static_cast<std::int64_t>(got->offsets.value(e));
    const auto end = static_cast<std::int64_t>(got->offsets.value(e + 1));
    const std::int64_t rows = end - begin;
    EXPECT_TRUE(rows % o.tile == 0 || rows == s.tokens) << "expert " << e << " has " << rows;
    EXPECT_LT(std::abs(rows - count[e]), o.tile) << "expert " << e;
    EXPECT_LE(rows, s.tokens);
    EXPECT_TRUE(o.mode != RoundingMode::kUp || rows >= count[e]);
    EXPECT_TRUE(o.mode != RoundingMode::kDown || rows <= count[e]);
    EXPECT_TRUE(o.mode != RoundingMode::kNearest || 2 * std::abs(rows - count[e]) <= o.tile);
    std::int64_t kept = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      EXPECT_EQ(got->expert.value(i), e);
      EXPECT_TRUE(i == begin || got->token.value(i - 1) < got->token.value(i));
      kept += chosen.count({e, static_cast<std::int64_t>(got->token.value(i))});
    }
    // If rounding adds rows, all chosen rows stay; if it removes rows, only chosen rows stay.
    EXPECT_EQ(kept, std::min(rows, count[e])) << "expert " << e;
  }
}

class Rounding : public ::testing::TestWithParam<std::tuple<RoundingMode, DType>> {};

TEST_P(Rounding, EqualsTheNaiveImplementation) {
  const auto [mode, dtype] = GetParam();
  std::mt19937_64 random(23);
  const DType weight_dtype = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  for (const Shape& s : kShapes) {
    for (const std::int64_t tile : kTiles) {
      for (const Flavour flavour : testing::kFlavours) {
        const auto draw = random();
        Guarded logits(dtype, s.tokens * s.experts);
        fill_logits(&logits, s.experts, flavour, &random);
        Guarded bias(DType::kF32, s.experts);
        fill_logits(&bias, s.experts, Flavour::kNormal, &random);
        RoundOptions o;
        o.mode = mode;
        o.tile = tile;
        o.seed = random();
        o.route.top_k = s.top_k;
        o.route.score = static_cast<ScoreMode>(draw % 4);
        o.route.renormalize = static_cast<std::int32_t>(draw / 4 % 2);
        o.route.scale = draw / 8 % 2 == 0 ? 1.0 : 2.5;
        if (o.route.score >= ScoreMode::kSigmoid && draw / 16 % 2 == 0) {
          o.route.bias = bias.vector();
        }
        if (s.experts % 4 == 0 && draw / 32 % 2 == 0) {
          o.route.n_group = s.experts / 4;
          o.route.topk_group = (s.top_k + 3) / 4;
        }
        Result got(o, s.tokens, s.experts, weight_dtype);
        round(o, &logits, &got, s.tokens);
        SCOPED_TRACE(::testing::Message()
                     << "T " << s.tokens << " E " << s.experts << " K " << s.top_k << " tile "
                     << tile << " flavour " << static_cast<int>(flavour));
        if (dtype == DType::kF64) {
          expect_reference<double>(o, s, dtype, &logits, &got);
        } else {
          expect_reference<float>(o, s, dtype, &logits, &got);
        }
        expect_invariants(o, s, &logits, &got);
        if (HasFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Rounding,
                         ::testing::Combine(::testing::ValuesIn(kModes),
                                            ::testing::Values(DType::kF32, DType::kBF16,
                                                              DType::kF16, DType::kF64)));

RoundOptions options_of(RoundingMode mode, std::int64_t tile, std::int64_t top_k) {
  RoundOptions o;
  o.mode = mode;
  o.tile = tile;
  o.route.top_k = top_k;
  return o;
}

// Logits that send `count[e]` tokens to expert e with K = 1. Every token's other logits rise with
// the token, so that later tokens are the first to be added.
void send(const std::vector<std::int64_t>& count, Guarded* logits) {
  const auto experts = static_cast<std::int64_t>(count.size());
  std::int64_t t = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t i = 0; i < count[e]; ++i, ++t) {
      for (std::int64_t j = 0; j < experts; ++j) {
        logits->set(t * experts + j, j == e ? 5.0 : 0.001 * static_cast<double>(t));
      }
    }
  }
}

std::vector<std::int64_t> rounded_counts(const RoundOptions& o,
                                         const std::vector<std::int64_t>& count) {
  const auto experts = static_cast<std::int64_t>(count.size());
  std::int64_t tokens = 0;
  for (const auto c : count) tokens += c;
  Guarded logits(DType::kF32, tokens * experts);
  send(count, &logits);
  Result got(o, tokens, experts, DType::kF32);
  round(o, &logits, &got, tokens);
  std::vector<std::int64_t> rows;
  for (std::int64_t e = 0; e < experts; ++e) {
    rows.push_back(static_cast<std::int64_t>(got.offsets.value(e + 1) - got.offsets.value(e)));
  }
  return rows;
}

TEST(RoundingRules, WorkedExamplesOfTheDocumentation) {
  using Counts = std::vector<std::int64_t>;
  const auto rows = [](RoundingMode mode, const Counts& counts) {
    return rounded_counts(options_of(mode, 4, 1), counts);
  };
  EXPECT_EQ(rows(RoundingMode::kUp, {5, 3, 4, 0}), (Counts{8, 4, 4, 0}));
  EXPECT_EQ(rows(RoundingMode::kDown, {5, 3, 4, 0}), (Counts{4, 0, 4, 0}));
  EXPECT_EQ(rows(RoundingMode::kNearest, {5, 3, 4, 0}), (Counts{4, 4, 4, 0}));
  // Ties: 2 lies between 0 and 4 (even: 0), 6 between 4 and 8 (even: 8).
  EXPECT_EQ(rows(RoundingMode::kNearest, {2, 6, 10}), (Counts{0, 8, 8}));
  // Running sums: 5 -> 4 (-1), 5 -> 4 (-2), 5 -> 8 (+1), 5 -> 4 (0).
  EXPECT_EQ(rows(RoundingMode::kBalanced, {5, 5, 5, 5}), (Counts{4, 4, 8, 4}));
  // Adding three weak rows gains less mass than dropping one strong row loses.
  EXPECT_EQ(rows(RoundingMode::kScore, {5, 3, 4, 0}), (Counts{8, 4, 4, 0}));
}

TEST(RoundingRules, NeverMoreThanEveryToken) {
  using Counts = std::vector<std::int64_t>;
  EXPECT_EQ(rounded_counts(options_of(RoundingMode::kUp, 1000, 1), {5, 2}), (Counts{7, 7}));
  EXPECT_EQ(rounded_counts(options_of(RoundingMode::kUp, std::int64_t{1} << 32, 1), {5, 2}),
            (Counts{7, 7}));
}

TEST(RoundingRules, StochasticDecidesAtTheStatedDraw) {
  const RoundBounds b = round_bounds(6, 8, 100);  // three quarters
  EXPECT_EQ(stochastic_count(b, 0), 8);
  EXPECT_EQ(stochastic_count(b, 0xbfffffffu), 8);
  EXPECT_EQ(stochastic_count(b, 0xc0000000u), 0);
  EXPECT_EQ(stochastic_count(b, 0xffffffffu), 0);
}

TEST(RoundingRules, StochasticIsFairAndSeeded) {
  constexpr std::int64_t kDraws = 4000;
  std::int64_t up = 0;
  for (std::int64_t seed = 0; seed < kDraws / 4; ++seed) {
    RoundOptions o = options_of(RoundingMode::kStochastic, 8, 1);
    o.seed = static_cast<std::uint64_t>(seed);
    const auto rows = rounded_counts(o, {6, 6, 6, 6});
    EXPECT_EQ(rows, rounded_counts(o, {6, 6, 6, 6}));
    for (const auto r : rows) up += r == 8 ? 1 : 0;
  }
  // Three quarters, within five standard deviations.
  const double sigma = std::sqrt(0.25 * 0.75 / kDraws);
  EXPECT_NEAR(static_cast<double>(up) / kDraws, 0.75, 5 * sigma);
}

TEST(RoundingRules, CapacityIsAsStated) {
  EXPECT_EQ(round_capacity(options_of(RoundingMode::kDown, 128, 8), 1000, 64), 8000);
  EXPECT_EQ(round_capacity(options_of(RoundingMode::kNearest, 128, 8), 1000, 64), 8000 + 64 * 64);
  EXPECT_EQ(round_capacity(options_of(RoundingMode::kNearest, 3, 1), 10, 5), 10 + 7);
  EXPECT_EQ(round_capacity(options_of(RoundingMode::kUp, 128, 8), 1000, 64), 8000 + 64 * 128);
  EXPECT_EQ(round_capacity(options_of(RoundingMode::kScore, 128, 8), 100, 64), 6400);
  EXPECT_THROW(round_capacity(options_of(RoundingMode::kUp, std::int64_t{1} << 62, 8), 100, 64),
               Error);
}

TEST(RoundingRules, ThreadsDoNotChangeABit) {
  constexpr std::int64_t kTokens = 6000, kExperts = 21;  // enough for several threads
  std::mt19937_64 random(5);
  Guarded logits(DType::kBF16, kTokens * kExperts);
  fill_logits(&logits, kExperts, Flavour::kSpecials, &random);
  for (const RoundingMode mode : kModes) {
    const RoundOptions o = options_of(mode, 64, 2);
    Result one(o, kTokens, kExperts, DType::kF32);
    round(o, &logits, &one, kTokens, {Backend::kCpu, 1});
    for (const int threads : {0, 2, 5}) {
      Result many(o, kTokens, kExperts, DType::kF32);
      round(o, &logits, &many, kTokens, {Backend::kCpu, threads});
      EXPECT_TRUE(one.token.same_bytes(many.token));
      EXPECT_TRUE(one.expert.same_bytes(many.expert));
      EXPECT_TRUE(one.weight.same_bytes(many.weight));
      EXPECT_TRUE(one.offsets.same_bytes(many.offsets));
    }
  }
}

}  // namespace
}  // namespace sonicmoe
