// The device that an operator runs on, and torch's current stream of that device.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "sonicmoe/c_api.h"
#include "sonicmoe/types.h"

namespace sonicmoe_torch {

/// Index of the engine that calls on CUDA use; -1: the library's choice. One value for the whole
/// process, because backward runs in other threads than forward.
inline std::atomic<std::int32_t> chosen_engine{-1};

/// The library's handle of a CUDA device with the chosen engine. The first call opens it. It is
/// never closed: the operators exist until the process ends, and no object could close it.
inline const smoe_device* device_handle(std::int32_t ordinal) {
  static std::mutex mutex;
  static std::map<std::pair<std::int32_t, std::int32_t>, const smoe_device*> opened;
  const std::int32_t engine = chosen_engine;
  const std::lock_guard lock(mutex);
  const smoe_device*& handle = opened[{ordinal, engine}];
  if (handle != nullptr) return handle;
  smoe_device_options options = {};
  options.size = sizeof options;
  options.ordinal = ordinal;
  options.engine = smoe_engine_name(engine);
  smoe_device* device = nullptr;
  const smoe_status status = smoe_device_open_with(&options, &device);
  if (status != SMOE_OK) {
    throw sonicmoe::Error(static_cast<sonicmoe::Status>(status), smoe_last_error());
  }
  return handle = device;
}

/// torch's current stream of a CUDA device. torch's function is looked up in the libtorch_cuda.so
/// that torch has loaded. If this library were linked to libtorch_cuda.so, it could not be loaded
/// with a torch without CUDA.
inline void* current_stream(std::int32_t ordinal) {
  using Get = AOTITorchError (*)(std::int32_t, void**);
  static const auto get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library == nullptr
               ? nullptr
               : reinterpret_cast<Get>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  if (get == nullptr) {
    throw sonicmoe::Error(sonicmoe::Status::kUnsupported,
                          "torch has CUDA tensors but no libtorch_cuda.so with the function "
                          "aoti_torch_get_current_cuda_stream: this torch build cannot be served");
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(ordinal, &stream));
  return stream;
}

/// The library's view of the place of `like`: the device and torch's current stream of it; on the
/// CPU the number of threads. The library itself makes the device current while it launches, and so
/// does torch while it allocates.
class DeviceScope {
 public:
  explicit DeviceScope(const torch::stable::Tensor& like) {
    if (!like.is_cuda()) {
      exec_.num_threads = static_cast<std::int32_t>(torch::stable::get_num_threads());
      return;
    }
    const std::int32_t ordinal = like.get_device_index();
    exec_.backend = sonicmoe::Backend::kCuda;
    exec_.device = device_handle(ordinal);
    exec_.stream = current_stream(ordinal);
  }
  const sonicmoe::Exec& exec() const { return exec_; }

 private:
  sonicmoe::Exec exec_;
};

}  // namespace sonicmoe_torch
