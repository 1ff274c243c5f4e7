// Which GPUs the code of a build runs on.
#include "cuda/device/architectures.h"

#include <gtest/gtest.h>

#include <string>

namespace sonicmoe {
namespace {

TEST(Architectures, SassRunsOnLaterMinorVersions) {
  constexpr int kCompiled[] = {86, 90, 120};
  for (const int runs : {86, 89, 90, 120, 121})
    EXPECT_TRUE(cuda::has_code(runs, kCompiled)) << runs;
  for (const int fails : {75, 80, 100, 103, 130}) {
    EXPECT_FALSE(cuda::has_code(fails, kCompiled)) << fails;
  }
}

TEST(Architectures, PtxOf80RunsOnAllThatIsNewer) {
  constexpr int kCompiled[] = {80};
  for (const int runs : {80, 86, 87, 90, 103, 130}) {
    EXPECT_TRUE(cuda::has_code(runs, kCompiled)) << runs;
  }
  EXPECT_FALSE(cuda::has_code(75, kCompiled));
}

TEST(Architectures, EveryOneOfTheBuildIsNamed) {
  const std::string names = cuda::code_names();
  for (const int architecture : cuda::architectures()) {
    EXPECT_TRUE(cuda::has_code(architecture));
    EXPECT_NE(names.find("sm_" + std::to_string(architecture)), std::string::npos) << names;
  }
}

}  // namespace
}  // namespace sonicmoe
