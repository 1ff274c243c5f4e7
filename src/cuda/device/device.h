// The device handle, and errors of the CUDA runtime.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

struct Engine;

/// A GPU that an engine serves. open_device() (cuda/engines.h) makes it. Immutable once opened, so
/// any thread may use it.
struct Device {
  int ordinal = -1;  ///< -1: a model without a GPU (device_model() of cuda/engines.h)
  int multiprocessors = 0;
  int block_shared = 0;                ///< bytes of shared memory that a block may have
  int capability = 0;                  ///< 90: compute capability 9.0
  const Engine* engine = nullptr;      ///< computes the products
  std::shared_ptr<void> engine_state;  ///< made by Engine::open
};

/// The handle of a call; throws if it is null or a model.
const Device& device_of(const Exec& exec);
inline cudaStream_t stream_of(const Exec& exec) { return static_cast<cudaStream_t>(exec.stream); }

/// Makes a handle's device current for the calling thread and restores the previous one at the end.
/// CUDA launches on the current device and sets function attributes for it, so that without this a
/// call would run on another device than its handle's.
class CurrentDevice {
 public:
  explicit CurrentDevice(const Device& device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = -1;  // -1: the device was already current
};

/// "9.0": a compute capability as people write it.
std::string dotted(int capability);

/// Throws Error(kCuda) that names `what` unless the status is success. Clears the runtime's last
/// error, so that the caller's own cudaGetLastError does not report it again.
void check_cuda(cudaError_t status, const char* what);

/// Looks up a function of the CUDA driver by name. The library does not link libcuda, so that it
/// loads on machines without a driver. Throws Error(kUnsupported) if driver or function is missing.
void* driver_function(const char* name);

}  // namespace sonicmoe::cuda
