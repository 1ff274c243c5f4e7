// The harness accepts a correct implementation: the oracle in the precision of the tensors.
#include "verify/harness.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "parts.h"

namespace sonicmoe::verify {
namespace {

TEST(Harness, AcceptsTheOracle) {
  const std::vector<CaseResult> results =
      verify({}, for_day_asked(oracle_implementation(oracle::Precision::kSame), Extent::kQuick));
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

TEST(Harness, FourDaysHaveAllCasesAndEachDayAllShapesAndVariants) {
  constexpr std::int64_t kFirstDay = 20'785;
  const Implementation all = oracle_implementation(oracle::Precision::kSame);
  std::set<std::string> cases, shapes, run;
  std::set<std::pair<DType, Data>> variants;
  for (const Case& c : all_cases(Extent::kQuick, "")) {
    if (!serves(all, c)) continue;
    cases.insert(c.name);
    shapes.insert(shape_of(c));
    variants.emplace(c.problem.dtype, c.data);
  }
  for (std::int64_t day = 0; day < kDaysForAllCases; day++) {
    const Implementation today = for_day(all, kFirstDay + day, Extent::kQuick);
    std::set<std::string> shapes_of_day;
    std::set<std::pair<DType, Data>> variants_of_day;
    std::size_t count = 0;
    for (const Case& c : all_cases(Extent::kQuick, "")) {
      if (!serves(today, c)) continue;
      count++;
      run.insert(c.name);
      shapes_of_day.insert(shape_of(c));
      variants_of_day.emplace(c.problem.dtype, c.data);
    }
    EXPECT_EQ(shapes_of_day, shapes);
    EXPECT_EQ(variants_of_day, variants);
    EXPECT_LT(count, cases.size() * 3 / 5);
  }
  EXPECT_EQ(run, cases);
}

}  // namespace
}  // namespace sonicmoe::verify
