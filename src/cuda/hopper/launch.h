// Launches of Hopper's product kernels, and the state that a device keeps for them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "cuda/device/device.h"
#include "cuda/hopper/kernels.h"
#include "cuda/tma/tensor_map.h"

namespace sonicmoe::cuda {

/// The state of one device. Any thread may use it: `encode` never changes, and to prepare a kernel
/// twice does no harm.
struct HopperState {
  EncodeTensorMap encode = nullptr;
  /// By index in kernel_list(): whether the kernel's attribute of shared memory is set on this
  /// device.
  std::unique_ptr<std::atomic<bool>[]> prepared;
};

/// Refuses a driver without tensor maps.
std::shared_ptr<void> open_hopper(int ordinal);
HopperState& hopper_state(const Device& device);

/// The kernel of a key. Throws if it is missing, which is a defect of the build.
const KernelEntry& find_kernel(const KernelKey& key);

/// The number of clusters of a launch; `tiles` is an upper bound of its tiles.
std::int64_t clusters_of(const Device& device, const TileShape& shape, std::int64_t tiles);

/// The shape of a launch: persistent CTAs of a tile, with `shared` bytes of dynamic shared memory,
/// one cluster on every pair of multiprocessors, but at most `tiles` clusters. `tiles` is an upper
/// bound of the clusters' tiles.
struct ClusterLaunch {
  TileShape shape;
  int shared;
  std::int64_t tiles;
};
/// Launches a kernel that may have so much shared memory; `params` is its Params.
void launch_clusters(const Device& device, const void* function, const ClusterLaunch& launch,
                     const void* params, cudaStream_t stream);

/// Launches a kernel of the list for at most `tiles` tiles of clusters.
void launch_product(const Device& device, const KernelEntry& kernel, const void* params,
                    std::int64_t tiles, cudaStream_t stream);

}  // namespace sonicmoe::cuda
