// Carves a caller's buffer into aligned pieces. The same code runs over a null base to learn how
// many bytes it needs, so sizes and pointers cannot disagree.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe {

class Arena {
 public:
  static constexpr std::int64_t kAlignment = 256;

  /// Without a buffer every piece is null and only bytes() means something.
  Arena() = default;
  explicit Arena(Buffer buffer) : base_(static_cast<std::byte*>(buffer.data)) {}

  /// `count` elements of T, uninitialised. Counts come from checked problems and fit 63 bits.
  template <class T>
  T* carve(std::int64_t count) {
    std::byte* piece = base_ == nullptr ? nullptr : base_ + bytes_;
    const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(T));
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(piece);
  }

  std::int64_t bytes() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace sonicmoe
