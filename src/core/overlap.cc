#include "core/overlap.h"

#include "core/check_tensor.h"

namespace sonicmoe::checks {
namespace {

std::int64_t magnitude(std::int64_t v) { return v < 0 ? -v : v; }

Range range_of(const Buffer& b) {
  const auto begin = reinterpret_cast<std::uintptr_t>(b.data);
  return {begin, begin + static_cast<std::uintptr_t>(b.bytes)};
}

// From the first to the last byte, gaps included.
Range range_of(const Tensor& t) {
  const auto base = reinterpret_cast<std::uintptr_t>(t.data);
  Range range{base, base + static_cast<std::uintptr_t>(dtype_bytes(t.dtype))};
  for (std::int32_t i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return {};
    const std::int64_t step = (t.shape[i] - 1) * t.stride[i] * dtype_bytes(t.dtype);
    (step < 0 ? range.begin : range.end) += static_cast<std::uintptr_t>(step);
  }
  return range;
}

// The bytes that a tensor occupies modulo `step`: its range without the dimensions whose stride is
// a multiple of `step`.
Range range_within(const Tensor& t, std::int64_t step) {
  Tensor inner = t;
  for (std::int32_t i = 0; i < t.rank; ++i) {
    if (t.stride[i] * dtype_bytes(t.dtype) % step == 0) inner.shape[i] = 1;
  }
  return range_of(inner);
}

// True if a and b occupy different bytes modulo `step`.
bool apart_modulo(const Tensor& a, const Tensor& b, std::int64_t step) {
  const Range first = range_within(a, step), second = range_within(b, step);
  const auto length = [](const Range& r) { return static_cast<std::int64_t>(r.end - r.begin); };
  std::int64_t distance = static_cast<std::int64_t>(second.begin - first.begin) % step;
  if (distance < 0) distance += step;
  return distance >= length(first) && length(second) <= step - distance;
}

bool apart_by_a_stride_of(const Tensor& strided, const Tensor& a, const Tensor& b) {
  for (std::int32_t i = 0; i < strided.rank; ++i) {
    const std::int64_t step = magnitude(strided.stride[i]) * dtype_bytes(strided.dtype);
    if (strided.shape[i] > 1 && step != 0 && apart_modulo(a, b, step)) return true;
  }
  return false;
}

[[noreturn]] void refuse_shared(const char* name, const char* other) {
  refuse(std::string(name) + " overlaps " + other + ", must be memory of its own");
}

}  // namespace

bool share_memory(const Tensor& a, const Tensor& b) {
  return range_of(a).overlaps(range_of(b)) && !apart_by_a_stride_of(a, a, b) &&
         !apart_by_a_stride_of(b, a, b);
}

void Lent::add(const char* name, const Tensor& tensor, Use use) {
  if (given(tensor)) tensors_.at(tensor_count_++) = {name, &tensor, range_of(tensor), use};
}

void Lent::add(const char* name, const Buffer& buffer) {
  if (buffer.data != nullptr) buffers_.at(buffer_count_++) = {name, range_of(buffer)};
}

void Lent::refuse_shared_memory() const {
  for (std::size_t i = 0; i < buffer_count_; ++i) {
    const NamedBuffer& buffer = buffers_[i];
    for (std::size_t j = i + 1; j < buffer_count_; ++j) {
      if (buffer.range.overlaps(buffers_[j].range)) refuse_shared(buffer.name, buffers_[j].name);
    }
    for (std::size_t j = 0; j < tensor_count_; ++j) {
      if (buffer.range.overlaps(tensors_[j].range)) refuse_shared(buffer.name, tensors_[j].name);
    }
  }
  for (std::size_t i = 0; i < tensor_count_; ++i) {
    const NamedTensor& written = tensors_[i];
    if (written.use != Use::kWritten) continue;
    for (std::size_t j = 0; j < tensor_count_; ++j) {
      const NamedTensor& other = tensors_[j];
      if (i != j && written.range.overlaps(other.range) &&
          share_memory(*written.tensor, *other.tensor)) {
        refuse_shared(written.name, other.name);
      }
    }
  }
}

}  // namespace sonicmoe::checks
