// Functions that all files of the runtime's interface use.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "runtime/capture.h"
#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/handles.h"

namespace sonicmoe::emulator {

Handles<Stream, cudaStream_t>& streams();
Handles<Event, cudaEvent_t>& events();

/// Null and cudaStreamLegacy name the default stream of the current device.
std::shared_ptr<Stream> stream_of(cudaStream_t handle);

/// Waits until an operation has ended. Throws ApiError if its device then has a fault.
void wait_on(const Device& device, const MomentPtr& end);

/// As status_of, for calls that return an error if the current device has a fault.
template <class F>
cudaError_t device_call(F f) noexcept {
  return status_of([&] {
    const cudaError_t fault = current_device().fault();
    require(fault == cudaSuccess, fault);
    f();
  });
}

}  // namespace sonicmoe::emulator
