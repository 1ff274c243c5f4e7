#include <gtest/gtest.h>

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
  EXPECT_EQ(dtype_from_name("bf16"), DType::kBF16);
  EXPECT_EQ(rounding_mode_from_name("balanced"), RoundingMode::kBalanced);
  EXPECT_EQ(score_mode_from_name("sigmoid"), ScoreMode::kSigmoid);
  EXPECT_STREQ(version_string(), SONICMOE_VERSION_STRING);
}

TEST(Names, UnknownIsRefusedByName) {
  try {
    activation_from_name("swish");
    FAIL() << "accepted";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::kInvalidArgument);
    EXPECT_STREQ(e.what(),
                 "activation is \"swish\", must be one of: swiglu, swiglu_oai, geglu, geglu_tanh, "
                 "reglu, silu, gelu, gelu_tanh, relu, relu2");
  }
}

}  // namespace
}  // namespace sonicmoe
