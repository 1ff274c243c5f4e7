// The device handle, and errors of the CUDA runtime.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

struct Engine;

/// A GPU that an engine serves. Immutable once opened, so any thread may use it.
struct Device {
  int ordinal = -1;  ///< -1: a model (device_model)
  int multiprocessors = 0;
  int capability = 0;                  ///< 90: compute capability 9.0
  const Engine* engine = nullptr;      ///< that multiplies on it
  std::shared_ptr<void> engine_state;  ///< of Engine::open
};

/// Refuses an ordinal without a GPU that an engine of the build serves. The result is Exec::device.
const Device* open_device(int ordinal);
void close_device(const Device* device);

/// A handle without a device, for sizes and plans; null where no engine serves the capability.
const Device* device_model(int capability);

/// The handle of a call; refuses a missing one and a model.
const Device& device_of(const Exec& exec);
inline cudaStream_t stream_of(const Exec& exec) { return static_cast<cudaStream_t>(exec.stream); }

/// Makes a handle's device current for the calling thread, and the one before again at the end:
/// launches and function attributes go to the current device, whatever handle the caller gave.
class CurrentDevice {
 public:
  explicit CurrentDevice(const Device& device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = -1;  // -1: the device was current already
};

/// Throws Error(kCuda) that names `what` unless the status is success. The runtime's own record of
/// the error is taken back: who asks for it later did not make this call.
void check_cuda(cudaError_t status, const char* what);

/// A function of the CUDA driver by its name. The library links nothing of libcuda, so that it
/// loads on a machine without a driver. Throws Error(kUnsupported) where it is missing.
void* driver_function(const char* name);

}  // namespace sonicmoe::cuda
