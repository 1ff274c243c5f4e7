// Operands of wgmma and tcgen05.mma as they lie in shared memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "matrix_fixture.h"

namespace sonicmoe::emulator {

struct Layout {
  Major major;
  int span;  ///< of the swizzle; 0: none
};

inline constexpr int kCoreBytes = 128;  // of a core matrix: eight lines of 16 bytes

inline int swizzled_chunk(int line, int chunk, int span) {
  switch (span) {
    case 128:
      return chunk ^ line % 8;
    case 64:
      return chunk ^ line / 2 % 4;
    case 32:
      return chunk ^ line / 4 % 2;
    default:
      return chunk;
  }
}

/// An operand in shared memory, and its descriptor. A row of a K-major operand has one span of the
/// swizzle, and the product reads the last 32 bytes of the row.
class Image {
 public:
  Image(const std::vector<float>& values, int rows, Type type, Layout layout)
      : type_(type), layout_(layout), rows_(rows) {
    bytes_.resize(static_cast<std::size_t>(rows) * std::max(layout.span, kDepthBytes));
    const int depth = type.depth();
    for (int r = 0; r < rows; ++r) {
      for (int k = 0; k < depth; ++k) {
        const std::uint32_t bits = bits_of(type.type, values[r * depth + k]);
        std::memcpy(bytes_.data() + place(r, k), &bits, type.bytes());
      }
    }
  }

  const std::vector<std::byte>& bytes() const { return bytes_; }
  /// The descriptors of wgmma and of tcgen05.mma for an image at `address`.
  std::uint64_t descriptor(int address) const {
    const auto span = static_cast<unsigned>(layout_.span);
    const std::uint64_t mode = span == 0 ? 0 : 8 - std::countr_zero(span);
    return field(address + skip()) | field(leading()) << 16 | field(stride()) << 32 | mode << 62;
  }
  std::uint64_t umma_descriptor(int address) const {
    return descriptor(address) | std::uint64_t{1} << 46;
  }

 private:
  static std::uint64_t field(int bytes) { return static_cast<std::uint64_t>(bytes) / 16; }
  bool is_k_major() const { return layout_.major == Major::kK; }
  int skip() const { return is_k_major() && layout_.span > 0 ? layout_.span - kDepthBytes : 0; }
  /// Without a swizzle: from a core matrix to the next one along K. MN-major: from a span of rows
  /// to the next one. K-major with a swizzle: not used.
  int leading() const {
    if (layout_.span == 0)
      return is_k_major() ? kCoreBytes : rows_ * type_.bytes() / 16 * kCoreBytes;
    return is_k_major() ? 16 : type_.depth() * layout_.span;
  }
  /// Without a swizzle: from a core matrix to the next one along the rows. K-major: eight rows
  /// further. MN-major: eight k further.
  int stride() const {
    if (layout_.span == 0) return is_k_major() ? 2 * kCoreBytes : kCoreBytes;
    return 8 * layout_.span;
  }
  int place(int row, int k) const {
    const int line = is_k_major() ? row : k;  // of a span, or of 16 bytes
    const int byte = (is_k_major() ? k : row) * type_.bytes();
    if (layout_.span == 0) {
      const int along_k = is_k_major() ? byte / 16 : line / 8;
      const int along_rows = is_k_major() ? line / 8 : byte / 16;
      return along_k * leading() + along_rows * stride() + line % 8 * 16 + byte % 16;
    }
    const int in_span = (skip() + byte) % layout_.span;
    return (skip() + byte) / layout_.span * leading() + line * layout_.span +
           swizzled_chunk(line, in_span / 16, layout_.span) * 16 + in_span % 16;
  }

  Type type_;
  Layout layout_;
  int rows_;
  std::vector<std::byte> bytes_;
};

}  // namespace sonicmoe::emulator
