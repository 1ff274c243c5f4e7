#include "cuda/device/device.h"

#include <dlfcn.h>

namespace sonicmoe::cuda {

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw Error(Status::kCuda, std::string(what) + " failed: " + cudaGetErrorString(status) + ".");
}

void* driver_function(const char* name) {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) {
    throw Error(Status::kUnsupported, "no CUDA driver was found (libcuda.so.1 cannot be loaded).");
  }
  void* function = dlsym(driver, name);
  if (function == nullptr) {
    throw Error(Status::kUnsupported, std::string("the CUDA driver has no function ") + name +
                                          "; it must be of CUDA 12.0 or later.");
  }
  return function;
}

std::string dotted(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

const Device& device_of(const Exec& exec) {
  const auto* device = static_cast<const Device*>(exec.device);
  if (device == nullptr) {
    throw Error(Status::kInvalidArgument,
                "exec.device is null but the CUDA backend needs the handle of smoe_device_open.");
  }
  if (device->ordinal < 0) {
    throw Error(Status::kInvalidArgument,
                "exec.device is a model of compute capability " + dotted(device->capability) +
                    " but this call needs the handle of smoe_device_open.");
  }
  return *device;
}

CurrentDevice::CurrentDevice(const Device& device) {
  int current = 0;
  check_cuda(cudaGetDevice(&current), "reading the current device");
  if (current == device.ordinal) return;
  check_cuda(cudaSetDevice(device.ordinal), "making the handle's device current");
  before_ = current;
}

CurrentDevice::~CurrentDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

}  // namespace sonicmoe::cuda
