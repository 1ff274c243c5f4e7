// Registration and launches of kernels, as the stubs of nvcc 13 and programs call them.
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/api.h"
#include "runtime/launch.h"
#include "runtime/module.h"

namespace sonicmoe::emulator {
namespace {

/// The configuration that <<<>>> gives. The stubs store it in one call and read it in another.
struct CallConfiguration {
  dim3 grid, block;
  std::size_t shared = 0;
  cudaStream_t stream = nullptr;
};
thread_local std::vector<CallConfiguration> call_configurations;

cudaError_t launch(const void* function, const LaunchShape& shape, void** arguments,
                   cudaStream_t handle) {
  return device_call([&] {
    const auto stream = stream_of(handle);
    require(&stream->device() == &current_device(), cudaErrorInvalidResourceHandle);
    Work work = launch_work(*kernels().find(function), shape, arguments, stream->device());
    const std::lock_guard lock(issue_mutex());
    issue(*stream, std::move(work));
  });
}

}  // namespace
}  // namespace sonicmoe::emulator

using namespace sonicmoe::emulator;

// Headers of CUDA declare these for code that nvcc compiles.
extern "C" {
void** __cudaRegisterFatBinary(void* wrapper) { return static_cast<void**>(wrapper); }

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void** handle) { kernels().remove_module(handle); }

void __cudaRegisterFunction(void** module, const char* host, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  kernels().add(host, std::make_shared<Kernel>(module, name));
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  call_configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  return status_of([&] {
    require(!call_configurations.empty(), cudaErrorInvalidConfiguration);
    const CallConfiguration& top = call_configurations.back();
    *grid = top.grid;
    *block = top.block;
    *shared = top.shared;
    *static_cast<cudaStream_t*>(stream) = top.stream;
    call_configurations.pop_back();
  });
}

cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* host) {
  return status_of([&] { *handle = reinterpret_cast<cudaKernel_t>(kernels().find(host).get()); });
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return launch(kernel, {grid, block, dim3(1, 1, 1), shared, false}, arguments, stream);
}
}

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  return launch(function, {grid, block, dim3(1, 1, 1), shared, false}, arguments, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** arguments) {
  LaunchShape shape;
  const cudaError_t status = status_of([&] { shape = shape_of(*config); });
  return status != cudaSuccess ? status : launch(function, shape, arguments, config->stream);
}

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  return device_call([&] {
    require(attribute == cudaFuncAttributeMaxDynamicSharedMemorySize, cudaErrorNotSupported);
    allow_dynamic_shared(*kernels().find(function), current_device(), value);
  });
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  return device_call(
      [&] { *attributes = attributes_of(*kernels().find(function), current_device()); });
}
