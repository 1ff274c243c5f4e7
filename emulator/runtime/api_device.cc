// Devices and their properties.
#include <cstdio>
#include <optional>

#include "runtime/api.h"
#include "runtime/configuration.h"
#include "runtime/memory.h"

namespace sonicmoe::emulator {
namespace {

constexpr int kRegisters = 65536;
constexpr int kL2Bytes = 50 << 20;
constexpr int kGreatestPriority = -5;

std::optional<int> attribute(cudaDeviceAttr which) {
  const Limits& limits = configuration().limits;
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
      return limits.capability / 10;
    case cudaDevAttrComputeCapabilityMinor:
      return limits.capability % 10;
    case cudaDevAttrMultiProcessorCount:
      return configuration().multiprocessors;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return static_cast<int>(kPlainShared);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return static_cast<int>(limits.block_shared);
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return static_cast<int>(limits.block_shared + kReservedShared);
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return static_cast<int>(kReservedShared);
    case cudaDevAttrMaxThreadsPerBlock:
      return kMostThreads;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return limits.multiprocessor_threads;
    case cudaDevAttrWarpSize:
      return kLanes;
    case cudaDevAttrL2CacheSize:
      return kL2Bytes;
    default:
      return {};
  }
}

cudaDeviceProp properties_of(const Device& device) {
  const Limits& limits = configuration().limits;
  cudaDeviceProp p{};
  std::snprintf(p.name, sizeof(p.name), "emulated");
  p.totalGlobalMem = device.total_memory();
  p.sharedMemPerBlock = kPlainShared;
  p.sharedMemPerBlockOptin = limits.block_shared;
  p.sharedMemPerMultiprocessor = limits.block_shared + kReservedShared;
  p.reservedSharedMemPerBlock = kReservedShared;
  p.regsPerBlock = p.regsPerMultiprocessor = kRegisters;
  p.warpSize = kLanes;
  p.maxThreadsPerBlock = kMostThreads;
  p.maxThreadsPerMultiProcessor = limits.multiprocessor_threads;
  p.major = limits.capability / 10;
  p.minor = limits.capability % 10;
  p.multiProcessorCount = configuration().multiprocessors;
  p.canMapHostMemory = p.unifiedAddressing = p.concurrentKernels = 1;
  p.clusterLaunch = limits.has_sm90();
  p.streamPrioritiesSupported = 1;
  p.asyncEngineCount = 1;
  p.l2CacheSize = kL2Bytes;
  p.pciBusID = device.ordinal() + 1;
  return p;
}

}  // namespace
}  // namespace sonicmoe::emulator

using namespace sonicmoe::emulator;

cudaError_t cudaGetDeviceCount(int* count) {
  return status_of([&] {
    *count = configuration().devices;
    require(*count > 0, cudaErrorNoDevice);
  });
}

cudaError_t cudaGetDevice(int* device) {
  return status_of([&] { *device = current_device().ordinal(); });
}

cudaError_t cudaSetDevice(int device) {
  return status_of([&] { choose_device(device); });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device) {
  return status_of([&] {
    device_of(device);
    const std::optional<int> known = attribute(which);
    require(known.has_value(), cudaErrorInvalidValue);
    *value = *known;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return status_of([&] { *properties = properties_of(device_of(device)); });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return status_of([&] {
    *least = 0;
    *greatest = kGreatestPriority;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return device_call([] {
    {
      const std::lock_guard lock(issue_mutex());
      refuse_capture_of_thread();
    }
    Device& device = current_device();
    device.synchronize();
    require(device.fault() == cudaSuccess, device.fault());
  });
}

// Streams and events stay valid, but everything that the device has allocated is gone.
cudaError_t cudaDeviceReset() {
  return status_of([] {
    Device& device = current_device();
    device.synchronize();
    memory().release_all(device.ordinal());
    device.reset();
    cudaGetLastError();
  });
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  return device_call([&] {
    Device& device = current_device();
    require(flags == 0, cudaErrorInvalidValue);
    require(device_of(peer).ordinal() != device.ordinal(), cudaErrorInvalidDevice);
    require(device.enable_peer(peer), cudaErrorPeerAccessAlreadyEnabled);
  });
}
