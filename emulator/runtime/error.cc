#include "runtime/error.h"

#include <map>

#include "runtime/device.h"

namespace sonicmoe::emulator {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

/// A fault of the device stays: reading it does not clear it.
cudaError_t with_fault(cudaError_t status) {
  cudaError_t fault = cudaSuccess;
  try {
    fault = current_device().fault();
  } catch (const ApiError&) {  // there is no device, so no fault either
  }
  return fault != cudaSuccess ? fault : status;
}

}  // namespace

cudaError_t note_error(cudaError_t status) { return last_error = status; }

}  // namespace sonicmoe::emulator

using namespace sonicmoe::emulator;

cudaError_t cudaGetLastError() {
  const cudaError_t status = with_fault(last_error);
  last_error = cudaSuccess;
  return status;
}

cudaError_t cudaPeekAtLastError() { return with_fault(last_error); }

const char* cudaGetErrorString(cudaError_t error) {
  static const auto& texts = *new std::map<cudaError_t, const char*>{
      {cudaSuccess, "no error"},
      {cudaErrorInvalidValue, "invalid argument"},
      {cudaErrorMemoryAllocation, "out of memory"},
      {cudaErrorInvalidConfiguration, "invalid configuration argument"},
      {cudaErrorInvalidPitchValue, "invalid pitch argument"},
      {cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"},
      {cudaErrorInvalidDeviceFunction, "invalid device function"},
      {cudaErrorNoDevice, "no CUDA-capable device is detected"},
      {cudaErrorInvalidDevice, "invalid device ordinal"},
      {cudaErrorMapBufferObjectFailed, "mapping of buffer object failed"},
      {cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"},
      {cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"},
      {cudaErrorInvalidResourceHandle, "invalid resource handle"},
      {cudaErrorIllegalState, "the operation cannot be performed in the present state"},
      {cudaErrorNotReady, "device not ready"},
      {cudaErrorIllegalAddress, "an illegal memory access was encountered"},
      {cudaErrorLaunchFailure, "unspecified launch failure"},
      {cudaErrorNotSupported, "operation not supported"},
      {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
      {cudaErrorStreamCaptureInvalidated,
       "operation failed due to a previous error during capture"},
      {cudaErrorStreamCaptureMerge, "operation would result in a merge of separate captures"},
      {cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"},
      {cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"},
      {cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"},
      {cudaErrorStreamCaptureImplicit,
       "operation would make the legacy stream depend on a capturing blocking stream"},
      {cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capture"},
      {cudaErrorStreamCaptureWrongThread,
       "attempt to terminate a thread-local capture sequence from another thread"},
      {cudaErrorInvalidClusterSize, "invalid cluster size"},
  };
  const auto found = texts.find(error);
  return found == texts.end() ? "unrecognized error code" : found->second;
}
