#include "cuda/portable/launch.h"

#include <algorithm>
#include <string>

#include "cuda/device/launch.h"
#include "cuda/layer/engine.h"

namespace sonicmoe::cuda::portable {

std::optional<Depth> depth_for(int capability, int shared) {
  for (const Depth depth : {Depth::k64, Depth::k32}) {
    if (is_compiled(depth, capability) && shared_bytes(depth) <= shared) return depth;
  }
  return {};
}

std::shared_ptr<void> open(int ordinal) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, ordinal), "reading device attributes");
    return value;
  };
  const int capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                         attribute(cudaDevAttrComputeCapabilityMinor);
  const int shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const std::optional<Depth> depth = depth_for(capability, shared);
  if (!depth) {
    throw Error(Status::kUnsupported,
                "device " + std::to_string(ordinal) + " has " + std::to_string(shared) +
                    " bytes of shared memory for a CTA but that is too few for the portable "
                    "engine's code for compute capability " +
                    dotted(capability) + ".");
  }
  return std::make_shared<State>(State{*depth});
}

const State& state_of(const Device& device) {
  return *static_cast<const State*>(device.engine_state.get());
}

std::int32_t ctas_of(const Device& device, std::int64_t tiles) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(device.multiprocessors, tiles));
}

void launch(const Device& device, const void* kernel, const void* params, std::int32_t ctas,
            cudaStream_t stream) {
  allow_shared_memory(kernel);
  void* arguments[] = {const_cast<void*>(params)};
  const auto shared = static_cast<std::size_t>(shared_bytes(state_of(device).depth));
  check_cuda(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(ctas)), dim3(kThreads), arguments,
                              shared, stream),
             "launching a kernel of the portable engine");
}

}  // namespace sonicmoe::cuda::portable
