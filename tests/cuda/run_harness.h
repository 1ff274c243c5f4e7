// Runs the harness on a device. SONICMOE_FILTER selects the cases whose names contain it;
// SONICMOE_EXTENT=full runs the large ones too.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>

#include "verify/device.h"
#include "verify/harness.h"

namespace sonicmoe::verify {

inline void expect_harness_passes(const Exec& exec) {
  constexpr std::size_t kMostLines = 40;
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
    if (++failed <= kMostLines) {
      std::cout << r.name << ": " << fault_name(r.fault) << ": " << r.message << std::endl;
    }
  };
  const auto results = verify(options, cuda_implementation(exec), progress);
  std::cout << results.size() << " cases, " << failed << " failed, worst ratio " << worst
            << std::endl;
  EXPECT_GT(results.size(), 0u);
  EXPECT_EQ(failed, 0u);
}

}  // namespace sonicmoe::verify
