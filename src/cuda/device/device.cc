#include "cuda/device/device.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "cuda/device/architectures.h"
#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {
namespace {

/// The capabilities that the engines of this build serve, as "9.0 (H100, H200)".
std::string served_capabilities() {
  std::string text;
  for (const Engine* engine : engines()) text += (text.empty() ? "" : ", ") + served_by(*engine);
  return text;
}

int attribute(int ordinal, cudaDeviceAttr which) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, ordinal), "reading device attributes");
  return value;
}

}  // namespace

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

const Device* open_device(int ordinal, const char* engine) {
  const EngineRequest request = engine_request(engine);
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess) cudaGetLastError();
  if (counted != cudaSuccess && counted != cudaErrorNoDevice) {
    throw Error(Status::kUnsupported,
                std::string("no CUDA device can be used: ") + cudaGetErrorString(counted) + ".");
  }
  if (ordinal < 0 || ordinal >= count) {
    throw Error(Status::kInvalidArgument, "ordinal is " + std::to_string(ordinal) +
                                              " but this machine has " + std::to_string(count) +
                                              " CUDA devices.");
  }
  auto device = std::make_unique<Device>();
  device->ordinal = ordinal;
  device->capability = attribute(ordinal, cudaDevAttrComputeCapabilityMajor) * 10 +
                       attribute(ordinal, cudaDevAttrComputeCapabilityMinor);
  device->multiprocessors = attribute(ordinal, cudaDevAttrMultiProcessorCount);
  device->block_shared = attribute(ordinal, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (!has_code(device->capability)) {
    throw Error(Status::kUnsupported, "device " + std::to_string(ordinal) +
                                          " has compute capability " + dotted(device->capability) +
                                          " but this build has code for " + code_names() +
                                          " only (SONICMOE_CUDA_ARCHITECTURES).");
  }
  if (engine_for(device->capability) == nullptr) {
    throw Error(Status::kUnsupported, "device " + std::to_string(ordinal) +
                                          " has compute capability " + dotted(device->capability) +
                                          " but the kernels of this build need " +
                                          served_capabilities() + ".");
  }
  device->engine = &choose_engine(device->capability, request);
  device->engine_state = device->engine->open(ordinal);
  return device.release();
}

void close_device(const Device* device) { delete device; }

const Device* device_model(int capability) {
  static std::mutex mutex;
  static std::map<std::pair<int, const Engine*>, Device> models;
  const EngineRequest request = engine_request(nullptr);
  if (!has_code(capability) || engine_for(capability) == nullptr) return nullptr;
  const Engine& engine = choose_engine(capability, request);
  const std::lock_guard lock(mutex);
  const auto [entry, is_new] = models.try_emplace({capability, &engine});
  if (is_new) {  // other threads may already read an existing entry
    entry->second.capability = capability;
    entry->second.engine = &engine;
  }
  return &entry->second;
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
