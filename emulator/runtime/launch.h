// Launches of kernels: the checks that CUDA makes, and the action that runs the grid.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>

#include "runtime/device.h"
#include "runtime/module.h"

namespace sonicmoe::emulator {

struct LaunchShape {
  dim3 grid, block, cluster;
  std::size_t shared = 0;    ///< dynamic
  bool may_overlap = false;  ///< programmatic dependent launch
};

/// Reads the attributes of a launch. Throws ApiError for an attribute that is not emulated, or that
/// the devices do not have.
LaunchShape shape_of(const cudaLaunchConfig_t& config);

/// Runs the kernel on the device, with a copy of the arguments. Throws ApiError where CUDA would
/// refuse the launch.
Work launch_work(Kernel& kernel, const LaunchShape& shape, void** arguments, const Device& device);

/// cudaFuncAttributeMaxDynamicSharedMemorySize.
void allow_dynamic_shared(Kernel& kernel, const Device& device, int bytes);
cudaFuncAttributes attributes_of(Kernel& kernel, const Device& device);

}  // namespace sonicmoe::emulator
