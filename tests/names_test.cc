#include <gtest/gtest.h>

#include <iterator>

#include "sonicmoe/moe.h"
#include "sonicmoe/routing.h"
#include "sonicmoe/types.h"
#include "sonicmoe/version.h"

namespace sonicmoe {
namespace {

TEST(Names, RoundTrip) {
  for (std::int32_t i = 0; i < kActivationCount; ++i) {
    const auto kind = static_cast<ActivationKind>(i);
    EXPECT_EQ(activation_from_name(activation_name(kind)), kind);
  }
  EXPECT_STREQ(activation_name(static_cast<ActivationKind>(kActivationCount)), "unknown");
  EXPECT_EQ(dtype_from_name("bf16"), DType::kBF16);
  EXPECT_EQ(precision_from_name("fp8"), Precision::kFp8);
  EXPECT_STREQ(precision_name(Precision::kTensors), "tensors");
  EXPECT_EQ(rounding_mode_from_name("balanced"), RoundingMode::kBalanced);
  EXPECT_EQ(score_mode_from_name("sigmoid"), ScoreMode::kSigmoid);
  EXPECT_EQ(score_mode_from_name("sqrt_softplus"), ScoreMode::kSqrtSoftplus);
  EXPECT_STREQ(version_string(), SONICMOE_VERSION_STRING);
}

// The table of traits against the enum, kind by kind: an order of the enum means nothing.
TEST(ActivationTraits, BelongToTheirKind) {
  struct Row {
    ActivationKind kind;
    const char* name;
    bool gated;
  };
  const Row rows[] = {
      {ActivationKind::kSwiGLU, "swiglu", true},
      {ActivationKind::kSwiGLUOai, "swiglu_oai", true},
      {ActivationKind::kGeGLU, "geglu", true},
      {ActivationKind::kGeGLUTanh, "geglu_tanh", true},
      {ActivationKind::kReGLU, "reglu", true},
      {ActivationKind::kSiLU, "silu", false},
      {ActivationKind::kGELU, "gelu", false},
      {ActivationKind::kGELUTanh, "gelu_tanh", false},
      {ActivationKind::kReLU, "relu", false},
      {ActivationKind::kReLU2, "relu2", false},
      {ActivationKind::kSwiGLUClamped, "swiglu_clamped", true},
      {ActivationKind::kSiTU, "situ", true},
      {ActivationKind::kSwiGLUStep, "swiglu_step", true},
  };
  ASSERT_EQ(std::size(rows), static_cast<std::size_t>(kActivationCount));
  for (const Row& row : rows) {
    EXPECT_STREQ(activation_name(row.kind), row.name);
    EXPECT_EQ(is_gated(row.kind), row.gated) << row.name;
    EXPECT_EQ(gate_factor(row.kind), row.gated ? 2 : 1) << row.name;
  }
}

TEST(ActivationTraits, GiveDefaultsOnlyForWhatAKindHas) {
  const Activation oai = with_defaults({ActivationKind::kSwiGLUOai, 0.0, 3.0});
  EXPECT_EQ(oai.alpha, 1.702);
  EXPECT_EQ(oai.limit, 3.0);
  const Activation clamped = with_defaults({ActivationKind::kSwiGLUClamped});
  EXPECT_EQ(clamped.alpha, 0.0);
  EXPECT_EQ(clamped.limit, 10.0);
  const Activation situ = with_defaults({ActivationKind::kSiTU, 2.0, 0.0});
  EXPECT_EQ(situ.alpha, 2.0);
  EXPECT_EQ(situ.limit, 25.0);
  EXPECT_EQ(with_defaults({ActivationKind::kSwiGLUStep}).limit, 7.0);
  const Activation silu = with_defaults({ActivationKind::kSiLU});
  EXPECT_EQ(silu.alpha, 0.0);
  EXPECT_EQ(silu.limit, 0.0);
}

TEST(Names, UnknownIsRefusedByName) {
  try {
    activation_from_name("swish");
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::kInvalidArgument);
    EXPECT_STREQ(e.what(),
                 "activation is \"swish\", must be one of: swiglu, swiglu_oai, geglu, geglu_tanh, "
                 "reglu, silu, gelu, gelu_tanh, relu, relu2, swiglu_clamped, situ, swiglu_step");
  }
}

}  // namespace
}  // namespace sonicmoe
