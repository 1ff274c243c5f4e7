#include "cuda/blackwell/launch.h"

#include <algorithm>

#include "cuda/blackwell/choices.h"
#include "cuda/blackwell/shape.h"
#include "cuda/device/launch.h"

namespace sonicmoe::cuda::blackwell {

std::shared_ptr<void> open(int) { return std::make_shared<State>(State{find_encode_tensor_map()}); }

const State& state_of(const Device& device) {
  return *static_cast<const State*>(device.engine_state.get());
}

std::int64_t pairs_of(const Device& device, std::int64_t tiles) {
  return std::clamp<std::int64_t>(device.multiprocessors / kCtas, 1, tiles);
}

LaunchOrder order_of(const LaunchHints& hints) {
  if (hints.start != Start::kIndependent) return {Begins::kAfterPrevious, nullptr};
  return {Begins::kIndependent, hints.arrival};
}

unsigned* counter_of(const RowGroups& groups, const LaunchHints& hints) {
  return groups.mean_rows() >= kDynamicRows ? hints.tile_counter : nullptr;
}

void run(const Kernel& kernel, std::int64_t pairs, const void* params, cudaStream_t stream) {
  allow_shared_memory(kernel.function);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCtas, 1, 1};
  // The kernel itself waits for the previous launch (Begins).
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(pairs * kCtas));
  config.blockDim = dim3(kernel.threads);
  config.dynamicSmemBytes = kernel.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  void* arguments[] = {const_cast<void*>(params)};
  check_cuda(cudaLaunchKernelExC(&config, kernel.function, arguments),
             "launching a kernel of the Blackwell engine");
}

}  // namespace sonicmoe::cuda::blackwell
