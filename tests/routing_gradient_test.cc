// Every gradient of the router against central finite differences in fp64, and the gradients of
// rows with special values.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>

#include "cpu/backend.h"
#include "routing_support.h"

namespace sonicmoe {
namespace {

using testing::Flavour;
using testing::Guarded;

constexpr std::int64_t kTokens = 9, kExperts = 8;

/// A scalar function of the logits, for which `gradient` was computed.
void expect_finite_differences(Guarded* logits, Guarded* gradient,
                               const std::function<double()>& value) {
  constexpr double kStep = 1e-6;
  for (std::int64_t i = 0; i < logits->count(); ++i) {
    const double at = logits->value(i);
    logits->set(i, at + kStep);
    const double above = value();
    logits->set(i, at - kStep);
    const double below = value();
    logits->set(i, at);
    const double want = (above - below) / (2 * kStep);
    ASSERT_NEAR(gradient->value(i), want, 2e-8 + 1e-6 * std::abs(want)) << "logit " << i;
  }
}

double dot(Guarded* a, Guarded* b, std::int64_t count) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < count; ++i) sum += a->value(i) * b->value(i);
  return sum;
}

/// Calls body with every combination of score mode, renormalisation, bias and groups.
void for_options(Guarded* bias, const std::function<void(const RouteOptions&)>& body) {
  for (int variant = 0; variant < 32; ++variant) {
    RouteOptions o;
    o.top_k = variant % 2 == 0 ? 3 : 2;
    o.score = static_cast<ScoreMode>(variant % 4);
    o.renormalize = variant / 4 % 2;
    o.scale = variant / 8 % 2 == 0 ? 1.0 : 2.5;
    if (o.score >= ScoreMode::kSigmoid && variant / 8 % 2 == 1) o.bias = bias->vector();
    if (variant / 16 % 2 == 1) {
      o.n_group = 4;
      o.topk_group = 2;
    }
    SCOPED_TRACE(::testing::Message() << "variant " << variant);
    body(o);
  }
}

struct Inputs {
  std::mt19937_64 random{17};
  Guarded logits{DType::kF64, kTokens* kExperts};
  Guarded bias{DType::kF32, kExperts};
  Guarded dlogits{DType::kF64, kTokens* kExperts};
  Inputs() {
    fill_logits(&logits, kExperts, Flavour::kNormal, &random);
    fill_logits(&bias, kExperts, Flavour::kNormal, &random);
  }
  Tensor x() { return logits.matrix(kTokens, kExperts); }
  Tensor dx() { return dlogits.matrix(kTokens, kExperts); }
};

TEST(RouterGradient, Route) {
  Inputs in;
  for_options(&in.bias, [&](const RouteOptions& o) {
    Guarded ids(DType::kI64, kTokens * o.top_k), weights(DType::kF64, kTokens * o.top_k);
    Guarded dweights(DType::kF64, kTokens * o.top_k);
    fill_logits(&dweights, o.top_k, Flavour::kNormal, &in.random);
    const auto matrix = [&](Guarded* g) { return g->matrix(kTokens, o.top_k); };
    const auto value = [&] {
      cpu::route(o, in.x(), matrix(&ids), matrix(&weights), {});
      return dot(&weights, &dweights, weights.count());
    };
    value();
    cpu::route_backward(o, in.x(), matrix(&ids), matrix(&dweights), in.dx(), {});
    expect_finite_differences(&in.logits, &in.dlogits, value);
  });
}

TEST(RouterGradient, TokenRound) {
  Inputs in;
  for_options(&in.bias, [&](const RouteOptions& route) {
    for (int mode = 0; mode < 6; ++mode) {
      RoundOptions o;
      o.route = route;
      o.tile = 4;
      o.mode = static_cast<RoundingMode>(mode);
      o.seed = 5;
      const std::int64_t capacity = round_capacity(o, kTokens, kExperts);
      Guarded token(DType::kI32, capacity), expert(DType::kI32, capacity);
      Guarded weight(DType::kF64, capacity), dweight(DType::kF64, capacity);
      Guarded offsets(DType::kI64, kExperts + 1);
      Guarded scratch(DType::kI64, cpu::round_scratch_bytes(o, kTokens, kExperts, {}) / 8);
      fill_logits(&dweight, 1, Flavour::kNormal, &in.random);
      const Pairs pairs = {token.vector(), expert.vector(), weight.vector(), offsets.vector()};
      const auto value = [&] {
        cpu::token_round(o, in.x(), pairs, scratch.buffer(), {});
        return dot(&weight, &dweight, static_cast<std::int64_t>(offsets.value(kExperts)));
      };
      value();
      for (auto i = static_cast<std::int64_t>(offsets.value(kExperts)); i < capacity; ++i) {
        // An unused pair has a token or an expert out of range. Its gradient must not be read.
        dweight.set(i, std::nan(""));
        const bool no_expert = i % 4 == 3;
        const double beyond[] = {kTokens, std::numeric_limits<std::int32_t>::max(), -7};
        token.set(i, no_expert ? 0 : beyond[i % 4]);
        expert.set(i, no_expert ? kExperts : 0);
      }
      cpu::token_round_backward(o, in.x(), pairs, dweight.vector(), in.dx(), scratch.buffer(), {});
      expect_finite_differences(&in.logits, &in.dlogits, value);
    }
  });
}

TEST(RouterGradient, ExpertChoice) {
  Inputs in;
  for (const std::int64_t capacity : {1, 4, 9, 20}) {
    const std::int64_t rows = kExperts * std::min(capacity, kTokens);
    Guarded token(DType::kI32, rows), expert(DType::kI32, rows), weight(DType::kF64, rows);
    Guarded dweight(DType::kF64, rows), offsets(DType::kI64, kExperts + 1);
    fill_logits(&dweight, 1, Flavour::kNormal, &in.random);
    const Pairs pairs = {token.vector(), expert.vector(), weight.vector(), offsets.vector()};
    const auto value = [&] {
      cpu::expert_choice(in.x(), capacity, pairs, {});
      return dot(&weight, &dweight, rows);
    };
    value();
    cpu::expert_choice_backward(in.x(), pairs, dweight.vector(), in.dx(), {});
    expect_finite_differences(&in.logits, &in.dlogits, value);
  }
}

TEST(RouterGradient, Losses) {
  Inputs in;
  for_options(&in.bias, [&](const RouteOptions& o) {
    Guarded ids(DType::kI64, kTokens * o.top_k), weights(DType::kF64, kTokens * o.top_k);
    Guarded values(DType::kF64, 2), counts(DType::kI64, kExperts), dvalues(DType::kF64, 2);
    dvalues.set(0, 0.7);
    dvalues.set(1, -1.3);
    const Tensor id = ids.matrix(kTokens, o.top_k);
    cpu::route(o, in.x(), id, weights.matrix(kTokens, o.top_k), {});
    const auto value = [&] {
      cpu::router_losses(o, in.x(), id, {values.vector(), counts.vector()}, {});
      return dot(&values, &dvalues, 2);
    };
    value();
    cpu::router_losses_backward(o, in.x(), counts.vector(), dvalues.vector(), in.dx(), {});
    expect_finite_differences(&in.logits, &in.dlogits, value);
  });
}

TEST(RouterGradient, EmptySlotsAndUnavailableExpertsGetZero) {
  const double inf = std::numeric_limits<double>::infinity();
  const double rows[3][4] = {
      {1.0, -inf, std::nan(""), -inf}, {-inf, -inf, -inf, -inf}, {inf, 2.0, -inf, 1.0}};
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    const DType weight_dtype = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    for (int score = 0; score < 3; ++score) {
      Guarded logits(dtype, 12), dlogits(dtype, 12), ids(DType::kI32, 6);
      Guarded weights(weight_dtype, 6), dweights(weight_dtype, 6);
      for (int i = 0; i < 12; ++i) logits.set(i, rows[i / 4][i % 4]);
      RouteOptions o;
      o.top_k = 2;
      o.score = static_cast<ScoreMode>(score);
      cpu::route(o, logits.matrix(3, 4), ids.matrix(3, 2), weights.matrix(3, 2), {});
      for (int i = 0; i < 6; ++i) {
        if (ids.value(i) >= 0) dweights.set(i, 1.0 + i);  // the others stay NaN
      }
      cpu::route_backward(o, logits.matrix(3, 4), ids.matrix(3, 2), dweights.matrix(3, 2),
                          dlogits.matrix(3, 4), {});
      for (int i = 0; i < 12; ++i) {
        const bool available = logits.value(i) > -inf;
        ASSERT_TRUE(std::isfinite(dlogits.value(i))) << i;
        if (!available) {
          ASSERT_EQ(dlogits.value(i), 0.0) << i;
        }
      }
    }
  }
}

// Gradients in fp32, bf16 and fp16 against those in fp64.
TEST(RouterGradient, LowerPrecisionsAgreeWithDouble) {
  constexpr std::int64_t kRows = 50, kWide = 96, kTop = 7;
  std::mt19937_64 random(29);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int score = 0; score < 3; ++score) {
      Guarded logits(dtype, kRows * kWide), exact(DType::kF64, kRows * kWide);
      Guarded dlogits(dtype, kRows * kWide), dexact(DType::kF64, kRows * kWide);
      Guarded ids(DType::kI64, kRows * kTop), weights(DType::kF32, kRows * kTop);
      Guarded dweights(DType::kF32, kRows * kTop), dweights64(DType::kF64, kRows * kTop);
      fill_logits(&logits, kWide, Flavour::kNormal, &random);
      fill_logits(&dweights, kTop, Flavour::kNormal, &random);
      for (std::int64_t i = 0; i < logits.count(); ++i) exact.set(i, logits.value(i));
      for (std::int64_t i = 0; i < dweights.count(); ++i) dweights64.set(i, dweights.value(i));
      RouteOptions o;
      o.top_k = kTop;
      o.score = static_cast<ScoreMode>(score);
      o.renormalize = 1;
      cpu::route(o, logits.matrix(kRows, kWide), ids.matrix(kRows, kTop),
                 weights.matrix(kRows, kTop), {});
      cpu::route_backward(o, logits.matrix(kRows, kWide), ids.matrix(kRows, kTop),
                          dweights.matrix(kRows, kTop), dlogits.matrix(kRows, kWide), {});
      cpu::route_backward(o, exact.matrix(kRows, kWide), ids.matrix(kRows, kTop),
                          dweights64.matrix(kRows, kTop), dexact.matrix(kRows, kWide), {});
      const double relative = dtype == DType::kF32    ? 1e-6
                              : dtype == DType::kBF16 ? 0x1p-8
                                                      : 0x1p-11;
      const double floor = dtype == DType::kF16 ? 0x1p-24 : 1e-6;
      for (std::int64_t i = 0; i < logits.count(); ++i) {
        const double want = dexact.value(i);
        ASSERT_NEAR(dlogits.value(i), want, floor + 1.01 * relative * std::abs(want)) << i;
      }
    }
  }
}

}  // namespace
}  // namespace sonicmoe
