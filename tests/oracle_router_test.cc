// The router's backward against central finite differences, and the rules of its choice.
#include "verify/oracle_router.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace sonicmoe::oracle {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kStep = 1e-5;

Matrix<double> random_matrix(std::int64_t rows, std::int64_t cols, std::uint64_t seed) {
  Matrix<double> m(rows, cols);
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  for (double& v : m.values) v = normal(engine);
  return m;
}

Matrix<double> row(std::vector<double> values) {
  Matrix<double> m(1, static_cast<std::int64_t>(values.size()));
  m.values = std::move(values);
  return m;
}

template <class Loss>
void expect_slopes(Matrix<double> logits, const Matrix<double>& dlogits, Loss loss) {
  for (std::size_t i = 0; i < logits.values.size(); ++i) {
    const double before = logits.values[i];
    logits.values[i] = before + kStep;
    const double above = loss(logits);
    logits.values[i] = before - kStep;
    const double below = loss(logits);
    logits.values[i] = before;
    EXPECT_NEAR((above - below) / (2.0 * kStep), dlogits.values[i], 1e-8) << "logit " << i;
  }
}

constexpr ScoreMode kModes[] = {ScoreMode::kSoftmaxAfterTopK, ScoreMode::kSoftmaxBeforeTopK,
                                ScoreMode::kSigmoid, ScoreMode::kSqrtSoftplus};

TEST(OracleRouter, BackwardIsTheSlopeOfForward) {
  for (const ScoreMode score : kModes) {
    for (const std::int32_t renormalize : {0, 1}) {
      RouteOptions options;
      options.top_k = 3;
      options.score = score;
      options.renormalize = renormalize;
      options.scale = 2.5;
      const Matrix<double> logits = random_matrix(4, 7, 5);
      Routed routed = route(options, logits);
      routed.ids(2, 1) = -1;  // an empty slot gives and takes nothing
      const Matrix<double> dweights = random_matrix(4, 3, 6);
      const auto loss = [&](const Matrix<double>& at) {
        const Matrix<double> w = route_weights(options, at, routed.ids);
        double sum = 0.0;
        for (std::size_t i = 0; i < w.values.size(); ++i) sum += w.values[i] * dweights.values[i];
        return sum;
      };
      SCOPED_TRACE(std::string(score_mode_name(score)) + (renormalize != 0 ? " renormalised" : ""));
      expect_slopes(logits, route_backward(options, logits, routed.ids, dweights), loss);
    }
  }
}

TEST(OracleRouter, LossGradientsAreSlopes) {
  for (const ScoreMode score : kModes) {
    RouteOptions options;
    options.top_k = 2;
    options.score = score;
    const Matrix<double> logits = random_matrix(5, 6, 7);
    const Matrix<std::int64_t> ids = route(options, logits).ids;
    const Losses at = router_losses(options, logits, ids);
    SCOPED_TRACE(score_mode_name(score));
    expect_slopes(logits, router_losses_backward(options, logits, at.tokens_per_expert, 0.7, -1.3),
                  [&](const Matrix<double>& l) {
                    const Losses losses = router_losses(options, l, ids);
                    return 0.7 * losses.load_balancing - 1.3 * losses.z;
                  });
  }
}

TEST(OracleRouter, BalancedLossIsOneAndEmptyIsZero) {
  RouteOptions options;
  options.top_k = 1;
  Matrix<double> logits(2, 2);
  Matrix<std::int64_t> ids(2, 1);
  ids.values = {0, 1};
  const Losses losses = router_losses(options, logits, ids);
  EXPECT_DOUBLE_EQ(losses.load_balancing, 1.0);
  EXPECT_DOUBLE_EQ(losses.z, std::log(2.0) * std::log(2.0));
  EXPECT_EQ(losses.tokens_per_expert, (std::vector<std::int64_t>{1, 1}));
  options.score = ScoreMode::kSigmoid;
  logits.values.assign(4, -1000.0);
  EXPECT_DOUBLE_EQ(router_losses(options, logits, ids).load_balancing, 1.0);
  options.score = ScoreMode::kSqrtSoftplus;
  EXPECT_DOUBLE_EQ(router_losses(options, logits, ids).load_balancing, 1.0);
  const Losses none = router_losses(options, Matrix<double>(0, 2), Matrix<std::int64_t>(0, 1));
  EXPECT_EQ(none.load_balancing, 0.0);
  EXPECT_EQ(none.z, 0.0);
}

TEST(OracleRouter, WeightsByHand) {
  const Matrix<double> logits = row({0.0, std::log(3.0), std::log(4.0)});
  RouteOptions options;
  options.top_k = 2;
  EXPECT_NEAR(route(options, logits).weights(0, 0), 4.0 / 7.0, 1e-15);
  options.score = ScoreMode::kSoftmaxBeforeTopK;
  EXPECT_NEAR(route(options, logits).weights(0, 1), 3.0 / 8.0, 1e-15);
  options.renormalize = 1;
  options.scale = 7.0;
  EXPECT_NEAR(route(options, logits).weights(0, 1), 3.0, 1e-14);
  options.score = ScoreMode::kSigmoid;
  options.renormalize = 0;
  options.scale = 1.0;
  EXPECT_NEAR(route(options, logits).weights(0, 0), 0.8, 1e-15);
  options.score = ScoreMode::kSqrtSoftplus;
  EXPECT_NEAR(route(options, logits).weights(0, 0), std::sqrt(std::log(5.0)), 1e-15);
}

TEST(OracleRouter, ChoiceRules) {
  RouteOptions options;
  options.top_k = 3;
  const auto ids = [&](std::vector<double> logits) {
    return route(options, row(std::move(logits))).ids.values;
  };
  using Ids = std::vector<std::int64_t>;
  EXPECT_EQ(ids({1.0, 2.0, 1.0, 1.0}), (Ids{1, 0, 2})) << "ties to the lower expert";
  EXPECT_EQ(ids({kNaN, 2.0, -kInf, -9.0}), (Ids{1, 3, -1})) << "NaN ranks as -inf, never chosen";
  EXPECT_EQ(ids({-kInf, kNaN, kNaN, -kInf}), (Ids{-1, -1, -1}));
  EXPECT_EQ(ids({1.0, kInf, 2.0, kInf}), (Ids{1, 3, 2}));
  const Routed infinite = route(options, row({1.0, kInf, 2.0, kInf}));
  EXPECT_EQ(infinite.weights.values, (std::vector<double>{0.5, 0.5, 0.0}));
}

TEST(OracleRouter, BiasOnlySelects) {
  float bias[] = {0.0f, 10.0f, 0.0f};
  RouteOptions options;
  options.top_k = 1;
  options.score = ScoreMode::kSigmoid;
  options.bias = tensor1(bias, DType::kF32, 3);
  const Routed routed = route(options, row({3.0, 0.0, 1.0}));
  EXPECT_EQ(routed.ids(0, 0), 1);
  EXPECT_EQ(routed.weights(0, 0), 0.5);
}

TEST(OracleRouter, GroupsLimitTheChoice) {
  RouteOptions options;
  options.top_k = 2;
  options.n_group = 3;
  options.topk_group = 1;
  // Group sums of the two best: 5 + 0, 3 + 3, 4 + 1.5.
  const Routed routed = route(options, row({5.0, 0.0, 3.0, 3.0, 4.0, 1.5}));
  EXPECT_EQ(routed.ids.values, (std::vector<std::int64_t>{2, 3}));
  options.topk_group = 3;
  EXPECT_EQ(route(options, row({-kInf, 9.0, 3.0, 3.0, -kInf, 4.0})).ids.values,
            (std::vector<std::int64_t>{1, 5}));
}

}  // namespace
}  // namespace sonicmoe::oracle
