// Tests of the layer, run with every engine of the build that serves device 0.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/engines.h"
#include "test_device.h"

namespace sonicmoe::testing {

inline std::vector<std::string> engine_names() {
  std::vector<std::string> names;
  for (const cuda::Engine* engine : cuda::engines()) names.emplace_back(engine->name);
  return names;
}

/// Has a handle of device 0 whose engine is the test's parameter. A test whose engine does not
/// serve the device is skipped.
class EachEngine : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const int capability = test_device().capability;
    for (const cuda::Engine* engine : cuda::engines()) {
      if (engine->name == GetParam() && !engine->service.capabilities.contain(capability)) {
        GTEST_SKIP() << GetParam() << " does not serve " << cuda::dotted(capability);
      }
    }
    device_ = open();
  }
  void TearDown() override { cuda::close_device(device_); }

  /// One more handle, which the caller closes.
  const cuda::Device* open(int ordinal = 0) const {
    return cuda::open_device(ordinal, GetParam().c_str());
  }
  static Exec exec_on(const cuda::Device* device) {
    Exec exec;
    exec.backend = Backend::kCuda;
    exec.device = device;
    return exec;
  }
  Exec exec() const { return exec_on(device_); }

  const cuda::Device* device_ = nullptr;
};

}  // namespace sonicmoe::testing

/// Runs the tests of a suite derived from EachEngine as Each/SUITE.TEST/ENGINE.
#define SONICMOE_FOR_EACH_ENGINE(suite)                                                           \
  INSTANTIATE_TEST_SUITE_P(Each, suite, ::testing::ValuesIn(::sonicmoe::testing::engine_names()), \
                           [](const auto& named) { return named.param; })
