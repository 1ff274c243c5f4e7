// Which stage depth the portable engine takes on a device.
#include <gtest/gtest.h>

#include <optional>

#include "cuda/portable/choices.h"

namespace sonicmoe {
namespace {

using cuda::portable::Depth;
using cuda::portable::depth_for;
using cuda::portable::narrow_depth_for;

constexpr int kKilobyte = 1024;

TEST(PortableDepth, IsTheLargestThatFits) {
  EXPECT_EQ(depth_for(80, 163 * kKilobyte), Depth::k64);
  EXPECT_EQ(depth_for(86, 99 * kKilobyte), Depth::k32);
  EXPECT_EQ(depth_for(90, 227 * kKilobyte), Depth::k64);
  EXPECT_EQ(depth_for(103, 227 * kKilobyte), Depth::k64);
  EXPECT_EQ(depth_for(120, 99 * kKilobyte), Depth::k32);
}

// A kernel that is not in the code of an architecture is empty there: its launch would not write
// the results.
TEST(PortableDepth, IsOneThatTheCodeHas) {
  EXPECT_EQ(depth_for(121, 227 * kKilobyte), Depth::k32);
  EXPECT_EQ(depth_for(100, 99 * kKilobyte), std::nullopt);
  EXPECT_EQ(depth_for(90, 48 * kKilobyte), std::nullopt);
}

TEST(PortableDepth, LetsTwoNarrowTilesShareAMultiprocessor) {
  EXPECT_EQ(narrow_depth_for(80, 164 * kKilobyte, kKilobyte), Depth::k32);
  EXPECT_EQ(narrow_depth_for(86, 100 * kKilobyte, kKilobyte), std::nullopt);
  EXPECT_EQ(narrow_depth_for(90, 228 * kKilobyte, kKilobyte), Depth::k64);
  EXPECT_EQ(narrow_depth_for(100, 228 * kKilobyte, kKilobyte), std::nullopt);
  EXPECT_EQ(narrow_depth_for(120, 228 * kKilobyte, kKilobyte), std::nullopt);
}

}  // namespace
}  // namespace sonicmoe
