#include "cuda/portable/launch.h"

#include <algorithm>
#include <string>

#include "cuda/device/launch.h"
#include "cuda/portable/choices.h"

namespace sonicmoe::cuda::portable {

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
  const int of_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const int reserved = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  return std::make_shared<State>(State{*depth,
                                       narrow_depth_for(capability, of_multiprocessor, reserved),
                                       is_compiled(kPackedShape, capability)});
}

const State& state_of(const Device& device) {
  return *static_cast<const State*>(device.engine_state.get());
}

std::int32_t ctas_of(const Device& device, const TileShape& shape, std::int64_t tiles) {
  const std::int64_t at_once = std::int64_t{device.multiprocessors} * ctas_each(shape);
  return static_cast<std::int32_t>(std::min(at_once, tiles));
}

void run(const Launch& launch, const void* params, cudaStream_t stream) {
  allow_shared_memory(launch.kernel);
  void* arguments[] = {const_cast<void*>(params)};
  const dim3 ctas(static_cast<unsigned>(launch.ctas));
  const dim3 threads(static_cast<unsigned>(threads_of(launch.shape)));
  const auto shared = static_cast<std::size_t>(shared_bytes(launch.shape) + launch.more_bytes);
  check_cuda(cudaLaunchKernel(launch.kernel, ctas, threads, arguments, shared, stream),
             "launching a kernel of the portable engine");
}

}  // namespace sonicmoe::cuda::portable
