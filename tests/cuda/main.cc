// main() of the device tests. With SONICMOE_TURNS=2 and a day (SONICMOE_DAY), every second one of
// the tests that were asked for runs, and the others run on the next day.
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "parts.h"

namespace {

void take_turns() {
  const char* turns = std::getenv("SONICMOE_TURNS");
  const std::optional<std::int64_t> day = sonicmoe::verify::day_asked();
  if (turns == nullptr || !day) return;
  setenv("GTEST_TOTAL_SHARDS", turns, 1);
  setenv("GTEST_SHARD_INDEX", std::to_string(*day % std::stoll(turns)).c_str(), 1);
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  take_turns();
  return RUN_ALL_TESTS();
}
