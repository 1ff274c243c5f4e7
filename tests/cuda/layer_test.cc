// The harness on the device: every case that CUDA serves, with every engine.
#include <gtest/gtest.h>

#include "each_engine.h"
#include "run_harness.h"

namespace sonicmoe::verify {
namespace {

class Cuda : public testing::EachEngine {};
SONICMOE_FOR_EACH_ENGINE(Cuda);

TEST_P(Cuda, PassesTheHarness) { expect_harness_passes(exec()); }

}  // namespace
}  // namespace sonicmoe::verify
