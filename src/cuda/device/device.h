// The device handle and what the host does with it: tensor maps, launches, errors.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "cuda/hopper/roles.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// Immutable once opened, so any thread may use it; `prepared` only remembers what was done.
struct Device {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                              const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                              const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  int ordinal = 0;
  int multiprocessors = 0;
  int capability = 0;  ///< 90: compute capability 9.0
  Encode encode = nullptr;
  /// By place in kernel_list(): whether the kernel may take its shared memory on this device.
  std::unique_ptr<std::atomic<bool>[]> prepared;
};

/// Refuses an ordinal without a Hopper GPU behind it. The result is Exec::device.
const Device* open_device(int ordinal);
void close_device(const Device* device);

/// The handle of a call; refuses a missing one.
const Device& device_of(const Exec& exec);
inline cudaStream_t stream_of(const Exec& exec) { return static_cast<cudaStream_t>(exec.stream); }

/// Throws Error(kCuda) that names `what` unless the status is success.
void check_cuda(cudaError_t status, const char* what);

/// One dimension of a tensor map, fastest first; the stride of the first is one element.
struct MapDim {
  std::int64_t size;
  std::int64_t stride;  ///< elements
  std::int32_t box;
};
/// Boxes are swizzled in shared memory by 64 bytes where a row of theirs is no longer, else by 128.
CUtensorMap encode_map(const Device& device, DType dtype, const void* base,
                       std::initializer_list<MapDim> dims);

/// How many clusters a launch of so many tiles (an upper bound) has.
std::int64_t clusters_of(const Device& device, const TileShape& shape, std::int64_t tiles);

/// Launches a kernel of the engine on all multiprocessors, or fewer where `tiles` (an upper bound
/// of the clusters' tiles) says so.
void launch_gemm(const Device& device, const KernelEntry& kernel, const void* params,
                 std::int64_t tiles, cudaStream_t stream);

}  // namespace sonicmoe::cuda
