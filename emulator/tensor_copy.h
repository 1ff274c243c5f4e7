// Boxes of tensors: which bytes of global memory they have, and where these lie in shared memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "machine.h"
#include "tensor_map.h"

namespace sonicmoe::emulator {

/// Where byte `address` of shared memory lies under a swizzle of `span` bytes (0: none): the chunks
/// of 16 bytes of a span change places by the number of the 128-byte line, modulo 8.
constexpr std::uint32_t swizzled(std::uint32_t address, std::uint32_t span) {
  return span == 0 ? address : address ^ (address >> 3 & (span - 16));
}

/// Coordinates of a box, fastest dimension first.
using Coordinates = std::array<std::int32_t, 5>;

class TensorBox {
 public:
  /// The box may lie outside of the tensor in part or as a whole.
  TensorBox(const TensorMap& map, const Coordinates& at);

  /// In shared memory. Bytes outside of the tensor count too.
  std::uint32_t bytes() const { return row_bytes_ * rows_; }
  /// Throws Fault unless all bytes inside the tensor are global memory.
  void check(const GlobalMemory& memory) const;

  /// Copies between global memory and the shared memory at `address`, whose host address is
  /// `shared`. A load writes zeros for what is outside of the tensor; a store leaves it out.
  void load(std::byte* shared, std::uint32_t address) const;
  void store(const std::byte* shared, std::uint32_t address) const;

 private:
  /// Calls f(number, is_inside, global address of byte begin_) for each row of the box.
  template <class F>
  void for_each_row(F f) const;

  TensorMap map_;
  Coordinates at_;
  std::uint32_t row_bytes_;
  std::uint32_t rows_;
  // The bytes of a row that are inside the tensor.
  std::uint32_t begin_;
  std::uint32_t end_;
};

}  // namespace sonicmoe::emulator
