// The harness on the device: every case that CUDA serves, with every engine.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "each_engine.h"
#include "verify/device.h"
#include "verify/harness.h"

namespace sonicmoe::verify {
namespace {

class Cuda : public testing::EachEngine {};
SONICMOE_FOR_EACH_ENGINE(Cuda);

// SONICMOE_FILTER selects the cases whose names contain it; SONICMOE_EXTENT=full runs the large
// ones too.
TEST_P(Cuda, PassesTheHarness) {
  VerifyOptions options;
  const char* filter = std::getenv("SONICMOE_FILTER");
  const char* extent = std::getenv("SONICMOE_EXTENT");
  if (filter != nullptr) options.filter = filter;
  if (extent != nullptr && std::string(extent) == "full") options.extent = Extent::kFull;
  std::size_t failed = 0;
  double worst = 0.0;
  const auto progress = [&](const CaseResult& r, std::size_t, std::size_t) {
    worst = std::max(worst, r.worst_ratio());
    if (r.passed()) return;
    if (++failed <= 40) {
      std::cout << r.name << ": " << fault_name(r.fault) << ": " << r.message << std::endl;
    }
  };
  const auto results = verify(options, cuda_implementation(exec()), progress);
  std::cout << results.size() << " cases, " << failed << " failed, worst ratio " << worst
            << std::endl;
  EXPECT_GT(results.size(), 0u);
  EXPECT_EQ(failed, 0u);
}

}  // namespace
}  // namespace sonicmoe::verify
