// Expert choice and the auxiliary losses: values against plain formulas.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>

#include "cpu/backend.h"
#include "routing_reference.h"

namespace sonicmoe {
namespace {

using testing::Flavour;
using testing::Guarded;

template <class Real>
void check_expert_choice(DType dtype, std::int64_t tokens, std::int64_t experts,
                         std::int64_t capacity, Guarded* logits) {
  const std::int64_t count = std::min(tokens, capacity);
  const DType weight_dtype = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  Guarded token(DType::kI32, experts * count), expert(DType::kI32, experts * count);
  Guarded weight(weight_dtype, experts * count), offsets(DType::kI64, experts + 1);
  cpu::expert_choice(logits->matrix(tokens, experts), capacity,
                     {token.vector(), expert.vector(), weight.vector(), offsets.vector()}, {});
  const auto x = testing::read_logits<Real>(logits, dtype, tokens, experts);
  testing::Rows<Real> p;
  for (const auto& row : x) p.push_back(testing::softmax(row));
  for (std::int64_t e = 0; e < experts; ++e) {
    std::vector<int> order(tokens);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return p[a][e] > p[b][e]; });
    order.resize(count);
    std::sort(order.begin(), order.end());
    ASSERT_EQ(offsets.value(e), e * count);
    for (std::int64_t i = 0; i < count; ++i) {
      ASSERT_EQ(token.value(e * count + i), order[i]) << "expert " << e;
      ASSERT_EQ(expert.value(e * count + i), e);
      ASSERT_EQ(weight.value(e * count + i), p[order[i]][e]);
    }
  }
  ASSERT_EQ(offsets.value(experts), experts * count);
}

TEST(ExpertChoice, EqualsPlainSorts) {
  std::mt19937_64 random(31);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const Flavour flavour : testing::kFlavours) {
      for (const std::int64_t tokens : {0, 1, 37, 300}) {
        for (const std::int64_t capacity : {1, 8, 37, 100}) {
          Guarded logits(dtype, tokens * 6);
          fill_logits(&logits, 6, flavour, &random);
          if (dtype == DType::kF64) {
            check_expert_choice<double>(dtype, tokens, 6, capacity, &logits);
          } else {
            check_expert_choice<float>(dtype, tokens, 6, capacity, &logits);
          }
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

struct Losses {
  double balance = 0.0;
  double z = 0.0;
  std::vector<std::int64_t> count;
};

// Straight from the formulas, in double.
Losses plain_losses(const RouteOptions& o, DType dtype, Guarded* logits, Guarded* ids,
                    std::int64_t tokens, std::int64_t experts) {
  const auto x = testing::read_logits<double>(logits, dtype, tokens, experts);
  Losses losses;
  losses.count.assign(experts, 0);
  std::vector<double> mean(experts, 0.0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    auto p = testing::probabilities(o, x[t]);
    const double scores = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& v : p) v = scores > 0.0 ? v / scores : 0.0;
    double sum = 0.0;
    const double top = *std::max_element(x[t].begin(), x[t].end());
    for (std::int64_t e = 0; e < experts; ++e) {
      mean[e] += p[e] / static_cast<double>(tokens);
      sum += std::exp(x[t][e] - top);
    }
    if (std::isfinite(top)) {
      losses.z += std::pow(top + std::log(sum), 2) / static_cast<double>(tokens);
    }
    for (std::int64_t k = 0; k < o.top_k; ++k) {
      const auto e = static_cast<std::int64_t>(ids->value(t * o.top_k + k));
      if (e >= 0 && e < experts) ++losses.count[e];
    }
  }
  for (std::int64_t e = 0; e < experts; ++e) {
    const double share =
        static_cast<double>(losses.count[e]) / static_cast<double>(tokens * o.top_k);
    losses.balance += static_cast<double>(experts) * share * mean[e];
  }
  return losses;
}

TEST(RouterLosses, EqualThePlainFormulas) {
  std::mt19937_64 random(37);
  constexpr std::int64_t kTokens = 600, kExperts = 12;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (int score = 0; score < 4; ++score) {
      for (const Flavour flavour : {Flavour::kNormal, Flavour::kEmptyRows}) {
        const DType value_dtype = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
        RouteOptions o;
        o.top_k = 3;
        o.score = static_cast<ScoreMode>(score);
        Guarded logits(dtype, kTokens * kExperts), ids(DType::kI32, kTokens * 3);
        Guarded values(value_dtype, 2), counts(DType::kI64, kExperts);
        fill_logits(&logits, kExperts, flavour, &random);
        for (std::int64_t i = 0; i < ids.count(); ++i) {
          ids.set(i, static_cast<double>(random() % 14) - 1.0);  // -1 and 12 are empty slots
        }
        cpu::router_losses(o, logits.matrix(kTokens, kExperts), ids.matrix(kTokens, 3),
                           {values.vector(), counts.vector()}, {});
        const Losses want = plain_losses(o, dtype, &logits, &ids, kTokens, kExperts);
        const double relative = dtype == DType::kF64 ? 1e-13 : 1e-6;
        EXPECT_NEAR(values.value(0), want.balance, relative * want.balance);
        EXPECT_NEAR(values.value(1), want.z, relative * want.z);
        for (std::int64_t e = 0; e < kExperts; ++e) EXPECT_EQ(counts.value(e), want.count[e]);
      }
    }
  }
}

TEST(RouterLosses, PerfectBalanceIsOne) {
  Guarded logits(DType::kF32, 16), ids(DType::kI64, 4), values(DType::kF32, 2);
  Guarded counts(DType::kI64, 4);
  for (int i = 0; i < 16; ++i) logits.set(i, 0.0);
  for (int i = 0; i < 4; ++i) ids.set(i, i);
  RouteOptions o;
  o.top_k = 1;
  cpu::router_losses(o, logits.matrix(4, 4), ids.matrix(4, 1), {values.vector(), counts.vector()},
                     {});
  EXPECT_FLOAT_EQ(static_cast<float>(values.value(0)), 1.0f);
  EXPECT_NEAR(values.value(1), std::pow(std::log(4.0), 2), 1e-6);
}

// DeepSeek-V3 divides sigmoids by their sum. Without this the loss would fall with all logits.
class PointwiseLosses : public ::testing::TestWithParam<ScoreMode> {};
INSTANTIATE_TEST_SUITE_P(All, PointwiseLosses,
                         ::testing::Values(ScoreMode::kSigmoid, ScoreMode::kSqrtSoftplus));
TEST_P(PointwiseLosses, BalancedScoresCostOneAtAnyHeight) {
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    for (const double height : {0.0, -5.0, -20.0, -100.0, 30.0}) {
      const DType value_dtype = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
      Guarded logits(dtype, 16), ids(DType::kI64, 4), values(value_dtype, 2);
      Guarded counts(DType::kI64, 4), dvalues(value_dtype, 2), dlogits(dtype, 16);
      for (int i = 0; i < 16; ++i) logits.set(i, height + (i / 4 == i % 4 ? 1.0 : 0.0));
      for (int i = 0; i < 4; ++i) ids.set(i, i);
      RouteOptions o;
      o.top_k = 1;
      o.score = GetParam();
      cpu::router_losses(o, logits.matrix(4, 4), ids.matrix(4, 1),
                         {values.vector(), counts.vector()}, {});
      EXPECT_NEAR(values.value(0), 1.0, 1e-6) << height;
      dvalues.set(0, 1.0);
      dvalues.set(1, 0.0);
      cpu::router_losses_backward(o, logits.matrix(4, 4), counts.vector(), dvalues.vector(),
                                  dlogits.matrix(4, 4), {});
      for (int i = 0; i < 16; ++i) EXPECT_NEAR(dlogits.value(i), 0.0, 1e-7) << height;
    }
  }
}

// Each sequence has the bits of a call of its own, and all E logits of a gradient are written.
TEST(RouterLosses, SequencesEqualTheirOwnCalls) {
  constexpr std::int64_t kSequences = 3, kLength = 70, kExperts = 12, kTop = 2;
  std::mt19937_64 random(43);
  Guarded logits(DType::kF32, kSequences * kLength * kExperts);
  fill_logits(&logits, kExperts, Flavour::kNormal, &random);
  Guarded ids(DType::kI64, kSequences * kLength * kTop);
  for (std::int64_t i = 0; i < ids.count(); ++i) ids.set(i, static_cast<double>(random() % 12));
  Guarded values(DType::kF32, kSequences * 2), counts(DType::kI64, kSequences * kExperts);
  Guarded dvalues(DType::kF32, kSequences * 2), dlogits(DType::kF32, logits.count());
  for (int i = 0; i < 6; ++i) dvalues.set(i, i - 2.5);
  RouteOptions o;
  o.top_k = kTop;
  o.score = ScoreMode::kSigmoid;
  const Tensor all = logits.matrix(kSequences * kLength, kExperts);
  router_losses(o, all, ids.matrix(kSequences * kLength, kTop),
                {values.matrix(kSequences, 2), counts.matrix(kSequences, kExperts)});
  router_losses_backward(o, all, counts.matrix(kSequences, kExperts), dvalues.matrix(kSequences, 2),
                         dlogits.matrix(kSequences * kLength, kExperts));
  for (std::int64_t s = 0; s < kSequences; ++s) {
    Guarded x(DType::kF32, kLength * kExperts), own(DType::kI64, kLength * kTop);
    Guarded value(DType::kF32, 2), count(DType::kI64, kExperts), dvalue(DType::kF32, 2);
    Guarded dx(DType::kF32, x.count());
    for (std::int64_t i = 0; i < x.count(); ++i) x.set(i, logits.value(s * x.count() + i));
    for (std::int64_t i = 0; i < own.count(); ++i) own.set(i, ids.value(s * own.count() + i));
    for (int i = 0; i < 2; ++i) dvalue.set(i, dvalues.value(2 * s + i));
    router_losses(o, x.matrix(kLength, kExperts), own.matrix(kLength, kTop),
                  {value.vector(), count.vector()});
    router_losses_backward(o, x.matrix(kLength, kExperts), count.vector(), dvalue.vector(),
                           dx.matrix(kLength, kExperts));
    const Losses want = plain_losses(o, DType::kF32, &x, &own, kLength, kExperts);
    EXPECT_NEAR(value.value(0), want.balance, 1e-6 * want.balance);
    for (int i = 0; i < 2; ++i) EXPECT_EQ(values.value(2 * s + i), value.value(i));
    for (std::int64_t e = 0; e < kExperts; ++e) {
      EXPECT_EQ(counts.value(s * kExperts + e), count.value(e));
    }
    for (std::int64_t i = 0; i < x.count(); ++i) {
      ASSERT_EQ(dlogits.value(s * x.count() + i), dx.value(i));
    }
  }
}

TEST(RouterLosses, NoTokensCostNothing) {
  Guarded none(DType::kF32, 0), ids(DType::kI64, 0), values(DType::kF32, 2);
  Guarded counts(DType::kI64, 5);
  RouteOptions o;
  o.top_k = 2;
  cpu::router_losses(o, none.matrix(0, 5), ids.matrix(0, 2), {values.vector(), counts.vector()},
                     {});
  EXPECT_EQ(values.value(0), 0.0);
  EXPECT_EQ(values.value(1), 0.0);
  for (int e = 0; e < 5; ++e) EXPECT_EQ(counts.value(e), 0.0);
  cpu::router_losses_backward(o, none.matrix(0, 5), counts.vector(), values.vector(),
                              none.matrix(0, 5), {});
}

TEST(RouterLosses, ThreadsDoNotChangeABit) {
  constexpr std::int64_t kTokens = 6000, kExperts = 21;  // enough for several threads
  std::mt19937_64 random(41);
  Guarded logits(DType::kF32, kTokens * kExperts), ids(DType::kI64, kTokens);
  fill_logits(&logits, kExperts, Flavour::kNormal, &random);
  for (std::int64_t t = 0; t < kTokens; ++t) ids.set(t, static_cast<double>(random() % kExperts));
  RouteOptions o;
  o.top_k = 1;
  Guarded one(DType::kF32, 2), counts(DType::kI64, kExperts);
  cpu::router_losses(o, logits.matrix(kTokens, kExperts), ids.matrix(kTokens, 1),
                     {one.vector(), counts.vector()}, {Backend::kCpu, 1});
  for (const int threads : {0, 2, 5}) {
    Guarded many(DType::kF32, 2);
    cpu::router_losses(o, logits.matrix(kTokens, kExperts), ids.matrix(kTokens, 1),
                       {many.vector(), counts.vector()}, {Backend::kCpu, threads});
    EXPECT_TRUE(one.same_bytes(many));
  }
}

}  // namespace
}  // namespace sonicmoe
