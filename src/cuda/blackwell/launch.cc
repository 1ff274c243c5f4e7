#include "cuda/blackwell/launch.h"

#include <algorithm>

#include "cuda/blackwell/shape.h"
#include "cuda/device/launch.h"

namespace sonicmoe::cuda::blackwell {
namespace {

/// An odd number, so that no pair gets the skipped tiles alone (engine/tiles.cuh).
unsigned pairs_of(const Device& device, std::int64_t tiles) {
  const std::int64_t pairs = std::clamp<std::int64_t>(device.multiprocessors / kCtas, 1, tiles);
  return static_cast<unsigned>(pairs - 1 + pairs % 2);
}

}  // namespace

std::shared_ptr<void> open(int ordinal) {
  const auto base = std::static_pointer_cast<portable::State>(portable::open(ordinal));
  return std::shared_ptr<portable::State>(std::make_shared<State>(*base, find_encode_tensor_map()));
}

const State& state_of(const Device& device) {
  return static_cast<const State&>(portable::state_of(device));
}

void run(const Device& device, const void* kernel, std::int64_t tiles, const void* params,
         cudaStream_t stream) {
  allow_shared_memory(kernel);
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCtas, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(pairs_of(device, tiles) * kCtas);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<void*>(params)};
  check_cuda(cudaLaunchKernelExC(&config, kernel, arguments),
             "launching a kernel of the Blackwell engine");
}

}  // namespace sonicmoe::cuda::blackwell
