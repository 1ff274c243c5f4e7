// Divides one block of memory into arrays.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda {

/// Takes arrays from one block of memory, each at a multiple of kAlign bytes from its base. With a
/// null base only used() is valid.
template <std::int64_t kAlign>
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<std::uint8_t*>(base)) {}
  template <class T>
  T* take(std::int64_t count) {
    static_assert(kAlign % alignof(T) == 0);
    T* array = reinterpret_cast<T*>(base_ + used_);
    used_ += (count * static_cast<std::int64_t>(sizeof(T)) + kAlign - 1) / kAlign * kAlign;
    return array;
  }
  std::int64_t used() const { return used_; }

 private:
  std::uint8_t* base_;
  std::int64_t used_ = 0;
};

}  // namespace sonicmoe::cuda
