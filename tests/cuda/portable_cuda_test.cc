// The portable engine's kernels for GPUs whose CTAs have 99 KB of shared memory. A GPU with more
// never takes them by itself, and code for 10.0 has none of them.
#include <gtest/gtest.h>

#include <memory>

#include "cuda/portable/launch.h"
#include "each_engine.h"
#include "verify/device.h"
#include "verify/harness.h"

namespace sonicmoe::verify {
namespace {

TEST(PortableEngine, PassesTheHarnessInLittleSharedMemory) {
  const std::unique_ptr<const cuda::Device, void (*)(const cuda::Device*)> device(
      cuda::open_device(0, "portable"), &cuda::close_device);
  using cuda::portable::Depth;
  if (!cuda::portable::is_compiled(Depth::k32, device->capability)) {
    GTEST_SKIP() << "code for " << cuda::dotted(device->capability) << " has none of them";
  }
  cuda::Device little = *device;
  little.engine_state = std::make_shared<cuda::portable::State>(cuda::portable::State{Depth::k32});
  Exec exec;
  exec.backend = Backend::kCuda;
  exec.device = &little;
  std::size_t failed = 0;
  const auto progress = [&](const CaseResult& r, std::size_t, std::size_t) {
    if (r.passed()) return;
    ++failed;
    ADD_FAILURE() << r.name << ": " << fault_name(r.fault) << ": " << r.message;
  };
  const auto results = verify(VerifyOptions{}, cuda_implementation(exec), progress);
  EXPECT_GT(results.size(), 0u);
  EXPECT_EQ(failed, 0u);
}

}  // namespace
}  // namespace sonicmoe::verify
