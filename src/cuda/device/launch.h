// Launches the kernels outside of the engines, most of them with programmatic dependent launch: the
// prologue of a kernel overlaps the end of the previous one.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "cuda/device/device.h"

namespace sonicmoe::cuda {

struct LaunchShape {
  dim3 grid;
  dim3 block;
  std::size_t shared = 0;
  unsigned cluster = 1;  ///< CTAs of a cluster along x, where the kernel's code has clusters
};

/// Dynamic shared memory that a launch may have without allow_shared_memory(), if the kernel has at
/// most 16 KB of static arrays.
inline constexpr std::size_t kPlainShared = 32 * 1024;

/// Shared memory that a block may have on every GPU. 8.6, 8.9 and 12.0 have no more.
inline constexpr std::size_t kLeastShared = 99 * 1024;

/// Threads of a CTA of a kernel that runs beside a weight gradient. A Hopper multiprocessor has
/// room for one such CTA next to a CTA of the weight gradient, because the small CTA has at most 32
/// registers a thread and no shared memory. An idle multiprocessor holds kBesideBlocks such CTAs;
/// as an argument of __launch_bounds__ this number limits the registers. Code for other
/// architectures may use 40 registers a thread, which ptxas needs there.
inline constexpr int kBesideThreads = 128;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
inline constexpr int kBesideBlocks = 16;
#else
inline constexpr int kBesideBlocks = 12;
#endif

/// Sets the dynamic shared memory limit of `function` to the current device's maximum, once for
/// each function and device; thread-safe. The limit is a property of function and device, not of a
/// launch: if it were set to the size of each launch, a small launch of one thread could lower it
/// below the size that another thread is about to launch. Side effect: CUDA clears an earlier error
/// that the caller has not read yet (CUDA 13.0, H100).
void allow_shared_memory(const void* function);

/// Whether the code of `function` that runs on `device`, which must be current, was compiled for
/// sm_90 or later: the value of ptx::kHasSm90 (cuda/ptx/sm90.cuh) in it. A device of 9.0 or later
/// may also run code that was compiled from PTX of compute_80, without clusters, programmatic
/// launches and bulk copies. Asks CUDA once for each function and device; thread-safe.
bool has_sm90(const Device& device, const void* function);
template <class... Params>
bool has_sm90(const Device& device, void (*kernel)(Params...)) {
  return has_sm90(device, reinterpret_cast<const void*>(kernel));
}

/// Launches `kernel` on `device`, which must be current. The kernel must call
/// ptx::wait_for_previous_kernel() before it touches what an earlier kernel may still use. Code for
/// architectures before sm_90 never waits: its launch has no attribute and no cluster, and kernels
/// run one after the other. Throws Error(kCuda) that names `what`.
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
  config.numAttrs = !has_sm90(device, kernel) ? 0 : shape.cluster > 1 ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), what);
}

/// Launches `kernel`, which begins after all earlier work of the stream. Throws Error(kCuda) that
/// names `what`. Unlike <<<>>> with cudaGetLastError, it does not report or clear an earlier error,
/// which is the caller's.
template <class... Params, class... Args>
void launch(const char* what, void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream,
            const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), what);
}

}  // namespace sonicmoe::cuda
