// The handles of streams, events and graphs that a program has.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime/error.h"

namespace sonicmoe::emulator {

/// Objects of type T, named by CUDA's opaque pointers of type Handle.
template <class T, class Handle>
class Handles {
 public:
  Handle add(std::shared_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    const auto handle = reinterpret_cast<Handle>(object.get());
    objects_[handle] = std::move(object);
    return handle;
  }
  /// Throws ApiError if `handle` is not a live handle.
  std::shared_ptr<T> find(Handle handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(handle);
    require(found != objects_.end(), cudaErrorInvalidResourceHandle);
    return found->second;
  }
  std::shared_ptr<T> remove(Handle handle) {
    const std::lock_guard lock(mutex_);
    const auto node = objects_.extract(handle);
    require(!node.empty(), cudaErrorInvalidResourceHandle);
    return node.mapped();
  }

 private:
  mutable std::mutex mutex_;
  std::map<Handle, std::shared_ptr<T>> objects_;
};

}  // namespace sonicmoe::emulator
