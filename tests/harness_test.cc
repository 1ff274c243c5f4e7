// The harness accepts a correct implementation: the oracle in the precision of the tensors.
#include "verify/harness.h"

#include <gtest/gtest.h>

#include <set>

#include "parts.h"

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

TEST(Harness, TwoDaysHaveAllCasesAndEachDayAllShapes) {
  const Implementation all = oracle_implementation(oracle::Precision::kSame);
  const Implementation days[] = {for_turn(all, 0, Extent::kQuick),
                                 for_turn(all, 1, Extent::kQuick)};
  std::set<std::string> shapes, of_day[2];
  std::size_t cases = 0, runs[2] = {};
  for (const Case& c : all_cases(Extent::kQuick, "")) {
    if (!serves(all, c)) continue;
    cases++;
    shapes.insert(without_variant(c));
    for (int day = 0; day < 2; day++) {
      if (!serves(days[day], c)) continue;
      runs[day]++;
      of_day[day].insert(without_variant(c));
    }
    EXPECT_TRUE(serves(days[0], c) || serves(days[1], c)) << c.name;
  }
  for (int day = 0; day < 2; day++) {
    EXPECT_EQ(of_day[day], shapes);
    EXPECT_LT(runs[day], cases * 3 / 4);
  }
}

}  // namespace
}  // namespace sonicmoe::verify
