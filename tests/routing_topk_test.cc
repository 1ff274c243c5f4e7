// route(): ids and weights against the naive second implementation, exactly.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <tuple>

#include "cpu/backend.h"
#include "routing_reference.h"

namespace sonicmoe {
namespace {

using testing::Flavour;
using testing::Guarded;

struct Shape {
  std::int64_t tokens, experts, top_k, n_group, topk_group;
};
constexpr Shape kShapes[] = {{0, 4, 2, 0, 0},    {1, 1, 1, 0, 0},      {5, 3, 3, 0, 0},
                             {17, 64, 8, 0, 0},  {300, 8, 2, 4, 2},    {33, 64, 8, 8, 3},
                             {9, 100, 33, 0, 0}, {3, 1000, 64, 10, 8}, {65, 12, 3, 12, 4},
                             {13, 256, 8, 1, 1}, {7, 48, 48, 0, 0},    {40, 16, 8, 8, 2}};
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
constexpr ScoreMode kScores[] = {ScoreMode::kSoftmaxAfterTopK, ScoreMode::kSoftmaxBeforeTopK,
                                 ScoreMode::kSigmoid, ScoreMode::kSqrtSoftplus};

DType weight_dtype(DType logits) { return logits == DType::kF64 ? DType::kF64 : DType::kF32; }

template <class Real>
void expect_reference(const RouteOptions& options, const Shape& s, DType dtype, Guarded* logits,
                      Guarded* ids, Guarded* weights) {
  const auto x = testing::read_logits<Real>(logits, dtype, s.tokens, s.experts);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const auto want = testing::choose(options, x[t]);
    for (std::int64_t k = 0; k < s.top_k; ++k) {
      ASSERT_EQ(ids->value(t * s.top_k + k), want.ids[k]) << "token " << t << " slot " << k;
      const double weight = weights->value(t * s.top_k + k);
      if (sizeof(Real) == 4) {
        ASSERT_EQ(weight, want.weights[k]) << "token " << t << " slot " << k;
      } else {
        ASSERT_NEAR(weight, want.weights[k], 1e-14 + 1e-14 * std::abs(weight));
      }
      ASSERT_FALSE(std::signbit(weight) && weight == 0);
    }
  }
}

class TopK : public ::testing::TestWithParam<std::tuple<DType, ScoreMode>> {};

TEST_P(TopK, EqualsTheNaiveImplementation) {
  const auto [dtype, score] = GetParam();
  std::mt19937_64 random(11);
  for (const Shape& s : kShapes) {
    for (const Flavour flavour : testing::kFlavours) {
      for (const int variant : {0, 1, 2, 3}) {
        Guarded logits(dtype, s.tokens * s.experts);
        fill_logits(&logits, s.experts, flavour, &random);
        const DType index = variant % 2 == 0 ? DType::kI64 : DType::kI32;
        Guarded ids(index, s.tokens * s.top_k);
        Guarded weights(weight_dtype(dtype), s.tokens * s.top_k);
        Guarded bias(DType::kF32, s.experts);
        fill_logits(&bias, s.experts, variant == 3 ? Flavour::kSpecials : Flavour::kNormal,
                    &random);
        RouteOptions options;
        options.top_k = s.top_k;
        options.score = score;
        options.renormalize = variant / 2;
        options.scale = variant == 0 ? 1.0 : 2.5;
        options.n_group = s.n_group;
        options.topk_group = s.topk_group;
        if (score >= ScoreMode::kSigmoid && variant > 0) options.bias = bias.vector();
        cpu::route(options, logits.matrix(s.tokens, s.experts), ids.matrix(s.tokens, s.top_k),
                   weights.matrix(s.tokens, s.top_k), {});
        SCOPED_TRACE(::testing::Message()
                     << "T " << s.tokens << " E " << s.experts << " K " << s.top_k << " flavour "
                     << static_cast<int>(flavour) << " variant " << variant);
        if (dtype == DType::kF64) {
          expect_reference<double>(options, s, dtype, &logits, &ids, &weights);
        } else {
          expect_reference<float>(options, s, dtype, &logits, &ids, &weights);
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, TopK,
                         ::testing::Combine(::testing::ValuesIn(kDTypes),
                                            ::testing::ValuesIn(kScores)));

RouteOptions plain(std::int64_t top_k) {
  RouteOptions options;
  options.top_k = top_k;
  return options;
}

std::vector<int> ids_of(const RouteOptions& options, const std::vector<float>& row) {
  Guarded logits(DType::kF32, static_cast<std::int64_t>(row.size()));
  for (std::size_t i = 0; i < row.size(); ++i) logits.set(static_cast<std::int64_t>(i), row[i]);
  Guarded ids(DType::kI64, options.top_k);
  Guarded weights(DType::kF32, options.top_k);
  cpu::route(options, logits.matrix(1, logits.count()), ids.matrix(1, options.top_k),
             weights.matrix(1, options.top_k), {});
  std::vector<int> result;
  for (std::int64_t k = 0; k < options.top_k; ++k) {
    result.push_back(static_cast<int>(ids.value(k)));
    EXPECT_TRUE(result.back() >= 0 || weights.value(k) == 0.0);
  }
  return result;
}

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNaN = std::nanf("");

TEST(TopKRules, StatedCases) {
  using Ids = std::vector<int>;
  EXPECT_EQ(ids_of(plain(2), {1, 3, 3, 2}), (Ids{1, 2}));                  // ties: lower first
  EXPECT_EQ(ids_of(plain(2), {-0.0f, 0.0f, -1, 0.0f}), (Ids{0, 1}));       // one zero
  EXPECT_EQ(ids_of(plain(3), {kNaN, -5, kNaN, -kInf}), (Ids{1, -1, -1}));  // never -inf or NaN
  EXPECT_EQ(ids_of(plain(2), {kInf, 3e38f, kInf, 4}), (Ids{0, 2}));
  EXPECT_EQ(ids_of(plain(1), {key::kLargestF32, kInf}), (Ids{0}));  // +inf ties with the largest
  EXPECT_EQ(ids_of(plain(2), {kNaN, kNaN}), (Ids{-1, -1}));
}

TEST(TopKRules, GroupsAreChosenByTheirTwoBest) {
  using Ids = std::vector<int>;
  RouteOptions options = plain(2);
  options.n_group = 3;
  options.topk_group = 1;
  EXPECT_EQ(ids_of(options, {9, 0, 5, 5, 4, 4}), (Ids{2, 3}));
  // A group with one available expert comes before a group with none. Of equal groups the lower
  // group is chosen.
  EXPECT_EQ(ids_of(options, {kNaN, kNaN, kNaN, -7, -kInf, 3}), (Ids{3, -1}));
}

TEST(TopKRules, BiasOnlySelects) {
  Guarded logits(DType::kF32, 3), ids(DType::kI64, 2), weights(DType::kF32, 2);
  Guarded bias(DType::kF32, 3);
  const double values[] = {0.0, 1.0, -40.0};
  const double biases[] = {0.0, 0.0, 12.0};
  for (int i = 0; i < 3; ++i) {
    logits.set(i, values[i]);
    bias.set(i, biases[i]);
  }
  RouteOptions options = plain(2);
  options.score = ScoreMode::kSigmoid;
  options.bias = bias.vector();
  cpu::route(options, logits.matrix(1, 3), ids.matrix(1, 2), weights.matrix(1, 2), {});
  EXPECT_EQ(ids.value(0), 2);
  EXPECT_EQ(ids.value(1), 1);
  // The sigmoid itself, not (sigmoid + bias) - bias, which would be 0 here.
  EXPECT_NEAR(weights.value(0) / std::exp(-40.0), 1.0, 1e-6);
}

TEST(TopKRules, RenormalisationOfNothingIsZero) {
  Guarded logits(DType::kF32, 2), ids(DType::kI64, 2), weights(DType::kF32, 2);
  logits.set(0, -200.0);
  logits.set(1, -300.0);
  RouteOptions options = plain(2);
  options.score = ScoreMode::kSigmoid;
  options.renormalize = 1;
  cpu::route(options, logits.matrix(1, 2), ids.matrix(1, 2), weights.matrix(1, 2), {});
  EXPECT_EQ(ids.value(0), 0);  // both sigmoids are 0 in fp32: a tie
  EXPECT_EQ(weights.value(0), 0.0);
  EXPECT_EQ(weights.value(1), 0.0);
}

TEST(TopKRules, StridedTensorsGiveTheSame) {
  constexpr std::int64_t kTokens = 19, kExperts = 10, kTop = 3;
  std::mt19937_64 random(3);
  for (const DType dtype : kDTypes) {
    Guarded logits(dtype, kTokens * kExperts), turned(dtype, kTokens * kExperts);
    fill_logits(&logits, kExperts, Flavour::kSpecials, &random);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t e = 0; e < kExperts; ++e) {
        turned.set(e * kTokens + t, logits.value(t * kExperts + e));
      }
    }
    Guarded ids(DType::kI64, kTokens * kTop), ids2(DType::kI64, kTokens * kTop);
    Guarded weights(weight_dtype(dtype), kTokens * kTop),
        weights2(weight_dtype(dtype), kTokens * kTop);
    const auto transposed = [&](Guarded* g, std::int64_t columns) {
      Tensor t = g->matrix(kTokens, columns);
      t.stride[0] = 1;
      t.stride[1] = kTokens;
      return t;
    };
    cpu::route(plain(kTop), logits.matrix(kTokens, kExperts), ids.matrix(kTokens, kTop),
               weights.matrix(kTokens, kTop), {});
    cpu::route(plain(kTop), transposed(&turned, kExperts), transposed(&ids2, kTop),
               transposed(&weights2, kTop), {});
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t k = 0; k < kTop; ++k) {
        ASSERT_EQ(ids.value(t * kTop + k), ids2.value(k * kTokens + t));
        ASSERT_EQ(weights.value(t * kTop + k), weights2.value(k * kTokens + t));
      }
    }
  }
}

TEST(TopKRules, ThreadsDoNotChangeABit) {
  constexpr std::int64_t kTokens = 1500, kExperts = 64, kTop = 8;
  std::mt19937_64 random(5);
  Guarded logits(DType::kBF16, kTokens * kExperts);
  fill_logits(&logits, kExperts, Flavour::kFewValues, &random);
  RouteOptions options = plain(kTop);
  options.score = ScoreMode::kSoftmaxBeforeTopK;
  Guarded ids(DType::kI64, kTokens * kTop), weights(DType::kF32, kTokens * kTop);
  cpu::route(options, logits.matrix(kTokens, kExperts), ids.matrix(kTokens, kTop),
             weights.matrix(kTokens, kTop), {Backend::kCpu, 1});
  for (const int threads : {0, 2, 3, 7}) {
    Guarded ids2(DType::kI64, kTokens * kTop), weights2(DType::kF32, kTokens * kTop);
    cpu::route(options, logits.matrix(kTokens, kExperts), ids2.matrix(kTokens, kTop),
               weights2.matrix(kTokens, kTop), {Backend::kCpu, threads});
    EXPECT_TRUE(ids.same_bytes(ids2));
    EXPECT_TRUE(weights.same_bytes(weights2));
  }
}

}  // namespace
}  // namespace sonicmoe
