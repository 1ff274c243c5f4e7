#include "verify/oracle_activation.h"

#include <gtest/gtest.h>

namespace sonicmoe::oracle {
namespace {

Activated<double> at(ActivationKind kind, double gate, double up) {
  return activate({kind, 0.0, 0.0}, gate, up);
}

// Derivatives against extended-precision central differences, away from kinks and on both sides of
// every clamp.
TEST(OracleActivation, DerivativesAreSlopes) {
  for (std::int32_t index = 0; index < kActivationCount; ++index) {
    const auto kind = static_cast<ActivationKind>(index);
    const Activation act{kind, 0.0, activation_traits(kind).limit != 0.0 ? 7.0 : 0.0};
    const auto value = [&](long double g, long double u) { return activate(act, g, u).value; };
    for (double g = -9.05; g < 9.1; g += 0.7) {
      for (double u = -9.15; u < 9.2; u += 1.1) {
        constexpr long double kStep = 1e-6L;
        const long double G = g, U = u;
        const auto a = activate(act, g, u);
        const auto by_gate =
            static_cast<double>((value(G + kStep, U) - value(G - kStep, U)) / (2 * kStep));
        const auto by_up =
            static_cast<double>((value(G, U + kStep) - value(G, U - kStep)) / (2 * kStep));
        EXPECT_NEAR(a.by_gate, by_gate, 1e-9) << activation_name(act.kind) << " " << g << " " << u;
        EXPECT_NEAR(a.by_up, by_up, 1e-9) << activation_name(act.kind) << " " << g << " " << u;
      }
    }
  }
}

// The smooth ones as PyTorch 2.13 prints them in fp64.
TEST(OracleActivation, KnownValues) {
  EXPECT_NEAR(at(ActivationKind::kSwiGLU, 1.5, 2.0).value, 2.452723428580931, 1e-14);
  EXPECT_NEAR(at(ActivationKind::kSiLU, 0.0, -0.7).value, -0.2322685594822837, 1e-14);
  EXPECT_NEAR(at(ActivationKind::kGELU, 0.0, 1.5).value, 1.399789198096713, 1e-14);
  EXPECT_NEAR(at(ActivationKind::kGELUTanh, 0.0, 1.5).value, 1.3995715769802328, 1e-14);
  EXPECT_EQ(at(ActivationKind::kReLU2, 0.0, 1.5).value, 2.25);
  EXPECT_EQ(at(ActivationKind::kReGLU, 3.0, -2.0).value, -6.0);
  EXPECT_NEAR(at(ActivationKind::kSwiGLUOai, 8.0, -9.0).value,
              7.0 / (1.0 + std::exp(-11.914)) * -6.0, 1e-13);
  EXPECT_NEAR(at(ActivationKind::kSwiGLUClamped, 12.0, -11.0).value, -99.99546021312978, 1e-12);
  EXPECT_EQ(at(ActivationKind::kSwiGLUStep, 8.0, -9.0).value, -49.0);
  EXPECT_NEAR(at(ActivationKind::kSwiGLUStep, 1.5, 2.0).value, 2.452723428580931, 1e-14);
  EXPECT_NEAR(at(ActivationKind::kSiTU, 1.5, 2.0).value, 2.3388834076446425, 1e-14);
  EXPECT_NEAR(at(ActivationKind::kSiTU, -3.0, 40.0).value, -2.776295519113946, 1e-14);
}

TEST(OracleActivation, KinksAsTorch) {
  for (const ActivationKind kind : {ActivationKind::kReLU, ActivationKind::kReLU2}) {
    EXPECT_EQ(at(kind, 0.0, 0.0).by_up, 0.0);
    EXPECT_EQ(at(kind, 0.0, 0.0).value, 0.0);
  }
  EXPECT_EQ(at(ActivationKind::kReGLU, 0.0, 3.0).by_gate, 0.0);
  // A clamp passes its gradient at equality and nothing beyond.
  for (const ActivationKind kind : {ActivationKind::kSwiGLUOai, ActivationKind::kSwiGLUClamped}) {
    const double limit = activation_traits(kind).limit;
    EXPECT_NE(at(kind, limit, 1.0).by_gate, 0.0) << activation_name(kind);
    EXPECT_EQ(at(kind, limit + 1e-9, 1.0).by_gate, 0.0) << activation_name(kind);
    EXPECT_NE(at(kind, -20.0, 1.0).by_gate, 0.0) << "the gate is not clamped below";
    for (const double sign : {-1.0, 1.0}) {
      EXPECT_NE(at(kind, 1.0, sign * limit).by_up, 0.0) << activation_name(kind);
      EXPECT_EQ(at(kind, 1.0, sign * (limit + 1e-9)).by_up, 0.0) << activation_name(kind);
    }
  }
}

TEST(OracleActivation, AlphaAndLimitAreParameters) {
  const Activation act{ActivationKind::kSwiGLUOai, 2.0, 3.0};
  EXPECT_NEAR(activate(act, 5.0, -4.0).value, 3.0 / (1.0 + std::exp(-6.0)) * -2.0, 1e-14);
  const Activation situ{ActivationKind::kSiTU, 2.0, 3.0};
  EXPECT_NEAR(activate(situ, 5.0, -4.0).value,
              2.0 * std::tanh(2.5) / (1.0 + std::exp(-5.0)) * 3.0 * std::tanh(-4.0 / 3.0), 1e-14);
  const Activation step{ActivationKind::kSwiGLUStep, 0.0, 3.0};
  EXPECT_EQ(activate(step, 5.0, -4.0).value, -9.0);
  const Activation clamped{ActivationKind::kSwiGLUClamped, 0.0, 3.0};
  EXPECT_NEAR(activate(clamped, 5.0, -4.0).value, 3.0 / (1.0 + std::exp(-3.0)) * -3.0, 1e-14);
}

}  // namespace
}  // namespace sonicmoe::oracle
