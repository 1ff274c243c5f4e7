// Launches of the small kernels: a shape, a stream and the attribute that lets a kernel's prologue
// overlap the end of the one before it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/device/device.h"

namespace sonicmoe::cuda {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::size_t shared = 0;
  unsigned cluster = 1;  ///< CTAs of a cluster along x
};

/// Shared memory that a kernel may use without asking, beside 16 KB of its own arrays.
inline constexpr std::size_t kPlainShared = 32 * 1024;

/// A block that finds room beside a weight gradient has so many threads, with 32 registers each,
/// and no shared memory. A multiprocessor that has nothing else to do holds so many such blocks.
inline constexpr int kBesideThreads = 128;
inline constexpr int kBesideBlocks = 16;

/// Lets `function` take as much dynamic shared memory as the current device has for a CTA. The
/// limit of a function belongs to the device: one that follows the size of each launch would let a
/// small launch of one thread refuse a large one of another. Set once a function and device; any
/// thread.
void allow_shared_memory(const void* function);

/// Clusters, programmatic launches and bulk copies: cuda/ptx/sm90.cuh on the host's side.
inline bool has_sm90(const Device& device) { return device.capability >= 90; }

/// Launches `kernel`, which must call ptx::wait_for_previous_kernel() before it touches what an
/// earlier kernel may still use. Before sm_90 the launch has no attribute, and `shape` no cluster:
/// kernels then run one after the other. Throws Error(kCuda) that names `what`.
template <class... Params, class... Args>
void launch_dependent(const Device& device, const char* what, void (*kernel)(Params...),
                      const LaunchShape& shape, cudaStream_t stream, const Args&... args) {
  if (shape.shared > kPlainShared) allow_shared_memory(reinterpret_cast<const void*>(kernel));
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = !has_sm90(device) ? 0 : shape.cluster > 1 ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), what);
}

}  // namespace sonicmoe::cuda
