#include "core/numeric.h"

#include <gtest/gtest.h>

#include <limits>

namespace sonicmoe {
namespace {

TEST(Numeric, EverySixteenBitPatternRoundTrips) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BF16 b{static_cast<std::uint16_t>(bits)};
    const F16 h{static_cast<std::uint16_t>(bits)};
    if (!std::isnan(to_float(b))) {
      EXPECT_EQ(to_bf16(to_float(b)).bits, b.bits);
    }
    if (!std::isnan(to_float(h))) {
      EXPECT_EQ(to_f16(to_float(h)).bits, h.bits);
    }
    EXPECT_EQ(std::isnan(to_float(to_bf16(to_float(b)))), std::isnan(to_float(b)));
    EXPECT_EQ(std::isnan(to_float(to_f16(to_float(h)))), std::isnan(to_float(h)));
  }
}

// Between two neighbours the nearer wins; half way the even one does.
TEST(Numeric, RoundsToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = to_float(F16{static_cast<std::uint16_t>(bits)});
    const float high = to_float(F16{static_cast<std::uint16_t>(bits + 1)});
    const float middle = 0.5f * (low + high);
    EXPECT_EQ(to_f16(middle).bits, bits % 2 == 0 ? bits : bits + 1);
    EXPECT_EQ(to_f16(std::nextafterf(middle, 0.0f)).bits, bits);
    EXPECT_EQ(to_f16(std::nextafterf(middle, 1e30f)).bits, bits + 1);
  }
  EXPECT_EQ(to_bf16(1.0f + 0x1p-8f).bits, 0x3f80);
  EXPECT_EQ(to_bf16(1.0f + 0x1.8p-7f).bits, 0x3f82);
  EXPECT_EQ(to_f16(65519.0f).bits, 0x7bff);
  EXPECT_EQ(to_f16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
}

}  // namespace
}  // namespace sonicmoe
