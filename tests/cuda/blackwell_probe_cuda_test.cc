// The probe of the engine blackwell. tests/blackwell_faults.py and tests/blackwell_mutations.py run
// this with faults in the kernels.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <string>

#include "cuda/engines.h"
#include "test_device.h"
#include "whole_layer.h"

namespace sonicmoe {
namespace {

// SONICMOE_EXPECTED_NOTE is a part of the sentence if the probe must fail.
TEST(BlackwellProbe, DecidesWhichEngineServes) {
  const int capability = testing::test_device().capability;
  if (capability / 10 != 10) GTEST_SKIP() << "the engine does not serve " << capability;
  const char* expected = std::getenv("SONICMOE_EXPECTED_NOTE");
  const cuda::Device* device = cuda::open_device(0, "blackwell");
  const std::string note = cuda::engine_note(*device);
  if (expected == nullptr) {
    EXPECT_STREQ(device->engine->name, "blackwell");
    EXPECT_EQ(note, "");
  } else {
    EXPECT_STREQ(device->engine->name, "portable");
    EXPECT_EQ(note.find("the engine blackwell does not serve device 0: its product"), 0u) << note;
    EXPECT_NE(note.find(expected), std::string::npos) << note;
    // The engine that serves instead works.
    const cuda::Device* portable = cuda::open_device(0, "portable");
    const testing::LayerShape shape{40, 64, 32, 3, 2};
    const Exec exec{.backend = Backend::kCuda, .device = device};
    const Exec other{.backend = Backend::kCuda, .device = portable};
    testing::WholeLayer layer(shape, exec);
    EXPECT_EQ(layer.run(exec), layer.run(other));
    cuda::close_device(portable);
  }
  std::cout << "note: " << note << "\n";
  cuda::close_device(device);
}

// Only the products whose names contain SONICMOE_PRODUCT, without opening the device with this
// engine, which would compute all.
TEST(BlackwellProbe, ComputesAProduct) {
  cuda::Device device = testing::test_device();
  if (device.capability / 10 != 10) {
    GTEST_SKIP() << "the engine does not serve " << device.capability;
  }
  const char* product = std::getenv("SONICMOE_PRODUCT");
  for (const cuda::Engine* engine : cuda::engines()) {
    if (engine->name != std::string("blackwell")) continue;
    device.engine = engine;
    device.engine_state = engine->open(device.ordinal);
    const std::string fault = engine->probe(device, product == nullptr ? "A, " : product);
    std::cout << "note: " << fault << "\n";
    EXPECT_EQ(fault, "");
  }
  EXPECT_NE(device.engine, nullptr);
}

}  // namespace
}  // namespace sonicmoe
