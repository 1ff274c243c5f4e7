// Finds arguments of a call that share memory.
#pragma once

#include <array>
#include <cstddef>

#include "sonicmoe/types.h"

namespace sonicmoe::checks {

enum class Use { kRead, kWritten };

/// A half-open range of addresses.
struct Range {
  std::uintptr_t begin = 0, end = 0;

  bool empty() const { return begin == end; }
  bool overlaps(const Range& other) const {
    return !empty() && !other.empty() && begin < other.end && other.begin < end;
  }
};

/// False if no byte belongs to an element of both tensors. Tensors that interleave (columns of one
/// matrix, alternating gate and up rows of one gradient) are recognised by a stride of either
/// tensor: modulo that stride they occupy different bytes. Other interleaved arrangements give
/// true.
bool share_memory(const Tensor& a, const Tensor& b);

/// The memory of a call's arguments: names and address ranges. Every call makes such a list, so the
/// class allocates nothing.
class Lent {
 public:
  void add(const char* name, const Tensor& tensor, Use use = Use::kRead);
  /// Memory that the call may write anywhere.
  void add(const char* name, const Buffer& buffer);

  /// Refuses a buffer that shares a byte with anything, and an output that shares an element with
  /// another tensor: a call may write its outputs and buffers in any order.
  void refuse_shared_memory() const;

 private:
  struct NamedTensor {
    const char* name;
    const Tensor* tensor;
    Range range;
    Use use;
  };
  struct NamedBuffer {
    const char* name;
    Range range;
  };

  std::array<NamedTensor, 33> tensors_;
  std::array<NamedBuffer, 6> buffers_;
  std::size_t tensor_count_ = 0;
  std::size_t buffer_count_ = 0;
};

}  // namespace sonicmoe::checks
