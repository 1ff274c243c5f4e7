// Allocations, copies and fills.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/api.h"
#include "runtime/memory.h"

namespace sonicmoe::emulator {
namespace {

/// Rows of equal length; one row if the memory is contiguous.
struct Rows {
  std::size_t width = 0, height = 1;
  std::size_t span(std::size_t pitch) const { return pitch * (height - 1) + width; }
  bool is_empty() const { return width == 0 || height == 0; }
};

/// Copies a word atomically and after all earlier writes, because kernels of other streams may wait
/// for this word.
template <class T>
void copy_word(std::byte* to, const std::byte* from) {
  const T value = std::atomic_ref<T>(*reinterpret_cast<T*>(const_cast<std::byte*>(from)))
                      .load(std::memory_order_acquire);
  std::atomic_ref<T>(*reinterpret_cast<T*>(to)).store(value, std::memory_order_release);
}

void copy_row(std::byte* to, const std::byte* from, std::size_t bytes) {
  const auto places = reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from);
  if (bytes == 4 && places % 4 == 0) {
    copy_word<std::uint32_t>(to, from);
  } else if (bytes == 8 && places % 8 == 0) {
    copy_word<std::uint64_t>(to, from);
  } else {
    std::memmove(to, from, bytes);
  }
}

/// One side of a copy.
struct Side {
  std::byte* data;
  std::size_t pitch;
};

enum class Place { kPageable, kPinned, kDevice };

/// Throws ApiError if the range leaves its allocation.
Place place_of(const Side& side, const Rows& rows) {
  const Extent extent = memory().find(side.data, rows.span(side.pitch));
  require(extent.bytes != 0 || !memory().is_ours(side.data), cudaErrorInvalidValue);
  if (extent.bytes == 0) return Place::kPageable;
  return extent.kind == Extent::Kind::kPinned ? Place::kPinned : Place::kDevice;
}

struct CopyRequest {
  Side to, from;
  Rows rows;
  cudaMemcpyKind kind;
};

/// Whether the pointers are where the kind says.
void check_kind(cudaMemcpyKind kind, Place to, Place from) {
  const bool to_device = to == Place::kDevice, from_device = from == Place::kDevice;
  switch (kind) {
    case cudaMemcpyDefault:
      return;
    case cudaMemcpyHostToHost:
      return require(!to_device && !from_device, cudaErrorInvalidValue);
    case cudaMemcpyHostToDevice:
      return require(to_device && !from_device, cudaErrorInvalidValue);
    case cudaMemcpyDeviceToHost:
      return require(!to_device && from_device, cudaErrorInvalidValue);
    case cudaMemcpyDeviceToDevice:
      return require(to_device && from_device, cudaErrorInvalidValue);
  }
  throw ApiError{cudaErrorInvalidMemcpyDirection};
}

Action copy_action(const CopyRequest& request) {
  return [request] {
    for (std::size_t row = 0; row < request.rows.height; ++row) {
      copy_row(request.to.data + row * request.to.pitch,
               request.from.data + row * request.from.pitch, request.rows.width);
    }
  };
}

/// A copy from pageable memory: as in CUDA, the memory is read before the call returns.
Action staged_copy_action(const CopyRequest& request) {
  const std::size_t bytes = request.rows.span(request.from.pitch);
  const auto stage =
      std::make_shared<std::vector<std::byte>>(request.from.data, request.from.data + bytes);
  CopyRequest from_stage = request;
  from_stage.from.data = stage->data();
  return [stage, copy = copy_action(from_stage)] { copy(); };
}

enum class Return { kAtOnce, kWhenDone };

void copy(const CopyRequest& request, cudaStream_t handle, Return returns) {
  if (request.rows.is_empty()) return;
  require(request.rows.width <= request.to.pitch && request.rows.width <= request.from.pitch,
          cudaErrorInvalidPitchValue);
  const Place to = place_of(request.to, request.rows);
  const Place from = place_of(request.from, request.rows);
  check_kind(request.kind, to, from);
  if (to == Place::kDevice && from == Place::kDevice) returns = Return::kAtOnce;
  if (to == Place::kPageable) returns = Return::kWhenDone;
  const bool is_staged = from == Place::kPageable && returns == Return::kAtOnce;
  Action action = is_staged ? staged_copy_action(request) : copy_action(request);
  const auto stream = stream_of(handle);
  MomentPtr end;
  {
    const std::lock_guard lock(issue_mutex());
    // A graph reads the memory when it is launched.
    const bool is_captured = stream->capture != nullptr;
    end = issue(*stream, is_captured ? copy_action(request) : std::move(action));
  }
  if (end != nullptr && returns == Return::kWhenDone) wait_on(stream->device(), end);
}

void fill(void* data, std::size_t pitch, int value, Rows rows, cudaStream_t handle) {
  if (rows.is_empty()) return;
  require(rows.width <= pitch, cudaErrorInvalidPitchValue);
  auto* bytes = static_cast<std::byte*>(data);
  require(place_of({bytes, pitch}, rows) != Place::kPageable, cudaErrorInvalidValue);
  const auto stream = stream_of(handle);
  const std::lock_guard lock(issue_mutex());
  const Action action = [bytes, pitch, value, rows] {
    for (std::size_t row = 0; row < rows.height; ++row) {
      std::memset(bytes + row * pitch, value, rows.width);
    }
  };
  issue(*stream, action);
}

void* allocate(std::size_t bytes, Extent::Kind kind) {
  {
    const std::lock_guard lock(issue_mutex());
    refuse_capture_of_thread();
  }
  if (bytes == 0) return nullptr;
  const Device& device = current_device();
  require(bytes <= device.free_memory(), cudaErrorMemoryAllocation);
  return memory().allocate(bytes, kind == Extent::Kind::kDevice ? device.ordinal() : kEveryDevice,
                           kind);
}

/// Waits for the device that has the memory, because a kernel may use it.
void release(void* address, Extent::Kind kind) {
  if (address == nullptr) return;
  {
    const std::lock_guard lock(issue_mutex());
    refuse_capture_of_thread();
  }
  const Extent extent = memory().find(address, 1);
  (extent.owner >= 0 ? device_of(extent.owner) : current_device()).synchronize();
  memory().release(address, kind);
}

CopyRequest contiguous(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return {{static_cast<std::byte*>(to), bytes},
          {static_cast<std::byte*>(const_cast<void*>(from)), bytes},
          {bytes},
          kind};
}

}  // namespace
}  // namespace sonicmoe::emulator

using namespace sonicmoe::emulator;

cudaError_t cudaMalloc(void** address, size_t bytes) {
  return device_call([&] { *address = allocate(bytes, Extent::Kind::kDevice); });
}

cudaError_t cudaFree(void* address) {
  return device_call([&] { release(address, Extent::Kind::kDevice); });
}

cudaError_t cudaMallocHost(void** address, size_t bytes) {
  return device_call([&] { *address = allocate(bytes, Extent::Kind::kPinned); });
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  return cudaMallocHost(address, bytes);
}

cudaError_t cudaFreeHost(void* address) {
  return device_call([&] { release(address, Extent::Kind::kPinned); });
}

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  return device_call([&] {
    const Extent extent = memory().find(host, 1);
    require(extent.bytes != 0 && extent.kind == Extent::Kind::kPinned, cudaErrorInvalidValue);
    *device = host;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  return device_call([&] {
    const Extent extent = memory().find(address, 1);
    *attributes = {};
    if (extent.bytes == 0) return;  // cudaMemoryTypeUnregistered
    const bool pinned = extent.kind == Extent::Kind::kPinned;
    attributes->type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = extent.owner == kEveryDevice ? current_device().ordinal() : extent.owner;
    attributes->devicePointer = const_cast<void*>(address);
  });
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return device_call([&] {
    *free = current_device().free_memory();
    *total = current_device().total_memory();
  });
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return device_call([&] { copy(contiguous(to, from, bytes, kind), nullptr, Return::kWhenDone); });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return device_call([&] { copy(contiguous(to, from, bytes, kind), stream, Return::kAtOnce); });
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  return device_call([&] {
    const CopyRequest request{{static_cast<std::byte*>(to), to_pitch},
                              {static_cast<std::byte*>(const_cast<void*>(from)), from_pitch},
                              {width, height},
                              kind};
    copy(request, stream, Return::kAtOnce);
  });
}

cudaError_t cudaMemset(void* data, int value, size_t bytes) {
  return cudaMemsetAsync(data, value, bytes, nullptr);
}

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  return device_call([&] { fill(data, bytes, value, {bytes}, stream); });
}

cudaError_t cudaMemset2DAsync(void* data, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream) {
  return device_call([&] { fill(data, pitch, value, {width, height}, stream); });
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  return device_call([&] {
    current_device().synchronize();
    const SharedMemoryName name = memory().share(address);
    static_assert(sizeof(name) <= sizeof(*handle));
    std::memset(handle, 0, sizeof(*handle));
    std::memcpy(handle, &name, sizeof(name));
  });
}

cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
  return device_call([&] {
    SharedMemoryName name;
    std::memcpy(&name, &handle, sizeof(name));
    require(name.process != getpid(), cudaErrorDeviceUninitialized);
    *address = memory().import(name, current_device().ordinal());
  });
}
