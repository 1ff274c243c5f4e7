#include "cuda/hopper/launch.h"

#include <algorithm>
#include <string>

namespace sonicmoe::cuda {

std::shared_ptr<void> open_hopper(int) {
  auto state = std::make_shared<HopperState>();
  state->encode = find_encode_tensor_map();
  state->prepared = std::make_unique<std::atomic<bool>[]>(kernel_list().size());
  return state;
}

HopperState& hopper_state(const Device& device) {
  return *static_cast<HopperState*>(device.engine_state.get());
}

const KernelEntry& find_kernel(const KernelKey& key) {
  for (const KernelEntry& entry : kernel_list()) {
    if (entry.key == key) return entry;
  }
  throw Error(Status::kInternal, "a kernel is missing from this build.");
}

std::int64_t clusters_of(const Device& device, const TileShape& shape, std::int64_t tiles) {
  return std::min<std::int64_t>(device.multiprocessors / shape.cluster, tiles);
}

void launch_clusters(const Device& device, const void* function, const ClusterLaunch& launch,
                     const void* params, cudaStream_t stream) {
  const auto cluster = static_cast<unsigned>(launch.shape.cluster);
  const auto clusters = static_cast<unsigned>(clusters_of(device, launch.shape, launch.tiles));
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {cluster, 1, 1};
  // The kernel itself waits for the previous launch, so that its prologue may overlap the end of
  // that launch.
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(clusters * cluster);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(launch.shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  void* arguments[] = {const_cast<void*>(params)};
  check_cuda(cudaLaunchKernelExC(&config, function, arguments), "launching a product");
}

void launch_product(const Device& device, const KernelEntry& kernel, const void* params,
                    std::int64_t tiles, cudaStream_t stream) {
  const TileShape shape = tile_shape(kernel.key.tile);
  const int bytes = shared_bytes(shape);
  // On first use: preparing every kernel when the device is opened would load them all.
  std::atomic<bool>& prepared = hopper_state(device).prepared[&kernel - kernel_list().data()];
  if (!prepared.load(std::memory_order_relaxed)) {
    check_cuda(
        cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "setting a kernel's shared memory");
    prepared.store(true, std::memory_order_relaxed);
  }
  launch_clusters(device, kernel.function, {shape, bytes, tiles}, params, stream);
}

}  // namespace sonicmoe::cuda
