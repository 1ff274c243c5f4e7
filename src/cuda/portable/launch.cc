#include "cuda/portable/launch.h"

#include <algorithm>
#include <string>

#include "cuda/device/launch.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {

namespace {

constexpr int shared_bytes(Depth depth) {
  return depth == Depth::k64 ? kSharedBytes<Depth::k64> : kSharedBytes<Depth::k32>;
}

}  // namespace

std::shared_ptr<void> open(int ordinal) {
  int most = 0;
  check_cuda(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal),
             "reading device attributes");
  if (most < kSharedBytes<Depth::k32>) {
    throw Error(Status::kUnsupported,
                "device " + std::to_string(ordinal) + " has " + std::to_string(most) +
                    " bytes of shared memory for a CTA but the kernels need " +
                    std::to_string(kSharedBytes<Depth::k32>) + ".");
  }
  return std::make_shared<State>(State{most < kSharedBytes<Depth::k64> ? Depth::k32 : Depth::k64});
}

const State& state_of(const Device& device) {
  return *static_cast<const State*>(device.engine_state.get());
}

std::int64_t ctas_of(const Device& device, std::int64_t tiles) {
  return std::min<std::int64_t>(device.multiprocessors, tiles);
}

void launch(const Device& device, const void* kernel, const void* params, std::int64_t tiles,
            cudaStream_t stream) {
  allow_shared_memory(kernel);
  void* arguments[] = {const_cast<void*>(params)};
  check_cuda(
      cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(ctas_of(device, tiles))), dim3(kThreads),
                       arguments, shared_bytes(state_of(device).depth), stream),
      "launching a kernel");
}

}  // namespace sonicmoe::cuda::portable
