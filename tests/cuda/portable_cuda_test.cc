// Runs on this GPU the tiles that the portable engine takes on other GPUs only.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "cuda/engines.h"
#include "cuda/portable/launch.h"
#include "run_harness.h"

namespace sonicmoe::verify {
namespace {

using cuda::portable::Depth;
using cuda::portable::State;
using cuda::portable::Width;

struct Tiles {
  const char* name;  ///< the GPUs' compute capability
  State state;
};
const Tiles kTiles[] = {{"of_8_0", {Depth::k64, Depth::k32, false}},
                        {"of_8_6", {Depth::k32, {}, false}},
                        {"of_10_0", {Depth::k64, {}, false}}};

bool are_compiled(const State& state, int capability) {
  using cuda::portable::is_compiled;
  return is_compiled({state.depth, Width::k256}, capability) &&
         (!state.narrow_depth || is_compiled({*state.narrow_depth, Width::k128}, capability));
}

class PortableTiles : public ::testing::TestWithParam<Tiles> {};

TEST_P(PortableTiles, PassTheHarness) {
  const std::unique_ptr<const cuda::Device, void (*)(const cuda::Device*)> device(
      cuda::open_device(0, "portable"), &cuda::close_device);
  const State& state = GetParam().state;
  if (!are_compiled(state, device->capability)) {
    GTEST_SKIP() << "code for " << cuda::dotted(device->capability) << " lacks some of them";
  }
  cuda::Device other = *device;
  other.engine_state = std::make_shared<State>(state);
  Exec exec;
  exec.backend = Backend::kCuda;
  exec.device = &other;
  expect_harness_passes(exec);
}

INSTANTIATE_TEST_SUITE_P(Each, PortableTiles, ::testing::ValuesIn(kTiles),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace sonicmoe::verify
