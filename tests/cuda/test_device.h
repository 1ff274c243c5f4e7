// The device of the tests that call metadata, routing and sums directly.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device/device.h"
#include "sonicmoe/types.h"

namespace sonicmoe::testing {

/// Device 0.
inline const cuda::Device& test_device() {
  static const cuda::Device device = [] {
    cuda::Device d;
    d.ordinal = 0;
    const auto attribute = [](cudaDeviceAttr which) {
      int value = 0;
      cuda::check_cuda(cudaDeviceGetAttribute(&value, which, 0), "reading device attributes");
      return value;
    };
    d.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
    d.block_shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    d.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                   attribute(cudaDevAttrComputeCapabilityMinor);
    return d;
  }();
  return device;
}

inline Exec test_exec() {
  Exec exec;
  exec.backend = Backend::kCuda;
  exec.device = &test_device();
  return exec;
}

}  // namespace sonicmoe::testing
