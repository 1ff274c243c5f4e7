// The harness accepts a correct implementation: the oracle in the precision of the tensors.
#include "verify/harness.h"

#include <gtest/gtest.h>

#include <set>

namespace sonicmoe::verify {
namespace {

TEST(Harness, AcceptsTheOracle) {
  const std::vector<CaseResult> results =
      verify({}, oracle_implementation(oracle::Precision::kSame));
  EXPECT_GE(results.size(), 200u);
  for (const CaseResult& r : results) {
    EXPECT_TRUE(r.passed()) << r.name << ": " << fault_name(r.fault) << ": " << r.message;
  }
}

TEST(Harness, CaseNamesAreUnique) {
  std::set<std::string> names;
  for (const Case& c : all_cases(Extent::kFull, "")) {
    EXPECT_TRUE(names.insert(c.name).second) << c.name;
  }
}

}  // namespace
}  // namespace sonicmoe::verify
