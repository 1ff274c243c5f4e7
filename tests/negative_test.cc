// The harness must reject each broken implementation, with the reason that belongs to its fault.
#include "verify/negative.h"

#include <gtest/gtest.h>

namespace sonicmoe::verify {
namespace {

void expect_rejected(const Implementation& sound, Extent extent, std::size_t at_least) {
  const std::vector<ControlResult> results = negative_controls({extent, ""}, sound);
  EXPECT_GE(results.size(), at_least);
  for (const ControlResult& r : results) {
    EXPECT_TRUE(r.rejected()) << r.name << " on " << r.case_name;
    EXPECT_TRUE(r.for_the_right_reason())
        << r.name << " on " << r.case_name << ": expected " << fault_name(r.expected) << ", found "
        << fault_name(r.fault) << ": " << r.message;
  }
}

// Full: with one bad row among 2^17.
TEST(Negative, BrokenOraclesAreRejected) {
  expect_rejected(oracle_implementation(oracle::Precision::kSame), Extent::kFull, 60);
}

}  // namespace
}  // namespace sonicmoe::verify
