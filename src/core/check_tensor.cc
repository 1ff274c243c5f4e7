#include "core/check_tensor.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "core/backend_table.h"

namespace sonicmoe::checks {
namespace {

std::string numbers(const std::int64_t* values, std::int32_t count) {
  std::string text = "(";
  for (std::int32_t i = 0; i < count; ++i) text += (i == 0 ? "" : ", ") + std::to_string(values[i]);
  return text + ")";
}

std::string letters(const Shape& shape) {
  std::string text = "(";
  for (std::int32_t i = 0; i < shape.rank; ++i) {
    text += std::string(i == 0 ? "" : ", ") + shape.dims[i].letter;
  }
  return text + ")";
}

std::int64_t magnitude(std::int64_t v) { return v < 0 ? -v : v; }

bool same_shape(const Tensor& tensor, const Shape& shape) {
  for (std::int32_t i = 0; i < shape.rank; ++i) {
    if (tensor.shape[i] != shape.dims[i].size) return false;
  }
  return true;
}

bool has_elements(const Tensor& tensor) {
  return std::all_of(tensor.shape, tensor.shape + tensor.rank, [](auto n) { return n > 0; });
}

// Adds the bytes of |stride| * steps elements to `bytes`. False if the sum reaches kMostBytes.
bool step_within_reach(std::int64_t stride, std::int64_t steps, std::int64_t element,
                       std::int64_t* bytes) {
  std::int64_t step = 0;
  return stride != INT64_MIN && !__builtin_mul_overflow(magnitude(stride), steps, &step) &&
         !__builtin_mul_overflow(step, element, &step) &&
         !__builtin_add_overflow(*bytes, step, bytes) && *bytes < kMostBytes;
}

// Refuses a tensor whose elements, or whose span from the first to the last element, reach
// kMostBytes. The stride of a dimension with one element or none counts once, because loops step
// past their last element: a stride near 2^62 would overflow there.
void size_and_reach(const Tensor& tensor, const char* name) {
  const std::int64_t element = dtype_bytes(tensor.dtype);
  std::int64_t size = element, span = element;
  for (std::int32_t i = 0; i < tensor.rank; ++i) {
    const std::int64_t extent = std::max<std::int64_t>(tensor.shape[i], 1);
    if (__builtin_mul_overflow(size, extent, &size) || size >= kMostBytes) {
      refuse(Status::kOutOfRange, std::string(name) + " has shape " +
                                      numbers(tensor.shape, tensor.rank) +
                                      ", must have fewer than 2^55 bytes");
    }
    const std::int64_t steps = std::max<std::int64_t>(extent - 1, 1);
    if (!step_within_reach(tensor.stride[i], steps, element, &span)) {
      refuse(Status::kOutOfRange, std::string(name) + " has strides " +
                                      numbers(tensor.stride, tensor.rank) +
                                      ", must span fewer than 2^55 bytes");
    }
  }
}

// Whether two elements may have the same address. Compares each stride with the distance that all
// smaller strides cover together: the stride must be larger. True for every tensor that overlaps
// itself, and for some that do not.
bool overlaps_itself(const Tensor& tensor) {
  std::array<std::pair<std::int64_t, std::int64_t>, 3> dims{};  // {stride, extent}
  for (std::int32_t i = 0; i < tensor.rank; ++i) {
    dims[i] = {magnitude(tensor.stride[i]), tensor.shape[i]};
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t last = 0;
  for (const auto& [stride, extent] : dims) {
    if (extent <= 1) continue;
    if (stride <= last) return true;
    last += (extent - 1) * stride;
  }
  return false;
}

void no_self_overlap(const Tensor& tensor, const char* name, const char* reason) {
  if (!has_elements(tensor) || !overlaps_itself(tensor)) return;
  refuse(std::string(name) + " has strides " + numbers(tensor.stride, tensor.rank) + " for shape " +
         numbers(tensor.shape, tensor.rank) + ", must not overlap itself because " + reason);
}

}  // namespace

void refuse(const std::string& sentence) { refuse(Status::kInvalidArgument, sentence); }
void refuse(Status status, const std::string& sentence) { throw Error(status, sentence); }

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

std::string DTypes::text() const {
  std::string text;
  for (std::int32_t i = 0; i <= static_cast<std::int32_t>(DType::kI64); ++i) {
    const auto t = static_cast<DType>(i);
    if (contains(t)) text += (text.empty() ? "" : " or ") + std::string(dtype_name(t));
  }
  return text;
}

void rank(const Tensor& tensor, const char* name, const char* letters, std::int32_t rank) {
  if (tensor.rank != rank) {
    refuse(std::string(name) + " has rank " + std::to_string(tensor.rank) + ", must be " +
           std::to_string(rank) + ": " + letters);
  }
}

void input(const Tensor& tensor, const char* name, const Shape& shape, DTypes dtypes) {
  if (tensor.rank != shape.rank) rank(tensor, name, letters(shape).c_str(), shape.rank);
  if (!same_shape(tensor, shape)) {
    std::array<std::int64_t, 3> wanted{};
    for (std::int32_t i = 0; i < shape.rank; ++i) wanted[i] = shape.dims[i].size;
    refuse(std::string(name) + " has shape " + numbers(tensor.shape, tensor.rank) + ", must be " +
           letters(shape) + " = " + numbers(wanted.data(), shape.rank));
  }
  if (!dtypes.contains(tensor.dtype)) {
    refuse(std::string(name) + " is " + dtype_name(tensor.dtype) + ", must be " + dtypes.text());
  }
  size_and_reach(tensor, name);
  if (has_elements(tensor) && tensor.data == nullptr) {
    refuse(std::string(name) + " is null, must point to " + letters(shape) + " = " +
           numbers(tensor.shape, tensor.rank) + " elements");
  }
}

void output(const Tensor& tensor, const char* name, const Shape& shape, DTypes dtypes) {
  input(tensor, name, shape, dtypes);
  no_self_overlap(tensor, name, "it is written");
}

void parameter(const Tensor& tensor, const char* name, const Shape& shape, DTypes dtypes) {
  input(tensor, name, shape, dtypes);
  no_self_overlap(tensor, name, "its gradient has a value for every element");
}

void absent(const Tensor& tensor, const std::string& name, const char* reason) {
  if (given(tensor)) refuse(name + " is given, must be empty: " + reason);
}

void refuse_below(const char* name, std::int64_t value, std::int64_t least) {
  refuse(std::string(name) + " is " + std::to_string(value) + ", must be at least " +
         std::to_string(least));
}

void refuse_past_31_bits(const char* name, std::int64_t value) {
  refuse(Status::kOutOfRange,
         std::string(name) + " is " + std::to_string(value) + ", must be below 2^31");
}

void refuse_not_finite(const char* name, double value) {
  refuse(std::string(name) + " is " + number_text(value) + ", must be finite" +
         (std::isfinite(value) ? " in f32" : ""));
}

void refuse_unknown(const char* name, std::int32_t value, std::int32_t count) {
  refuse(std::string(name) + " is " + std::to_string(value) + ", must be in 0 to " +
         std::to_string(count - 1));
}

void refuse_product(const char* name, std::initializer_list<std::int64_t> factors,
                    const char* limit) {
  std::string text;
  for (std::int64_t f : factors) text += (text.empty() ? "" : " * ") + std::to_string(f);
  refuse(Status::kOutOfRange, std::string(name) + " is " + text + ", must be below " + limit);
}

void buffer(const Buffer& buffer, const char* name, std::int64_t needed, const Exec& exec) {
  const auto least = [&] { return ", must have at least " + std::to_string(needed) + " bytes"; };
  if (buffer.data == nullptr) {
    if (needed > 0) refuse(Status::kWorkspaceTooSmall, std::string(name) + " is missing" + least());
    return;
  }
  if (buffer.bytes < needed) {
    refuse(Status::kWorkspaceTooSmall,
           std::string(name) + " has " + std::to_string(buffer.bytes) + " bytes" + least());
  }
  const auto alignment = backend_table(exec.backend).buffer_alignment;
  const auto offset = reinterpret_cast<std::uintptr_t>(buffer.data) % alignment;
  if (needed > 0 && offset != 0) {
    const std::string bytes = std::to_string(alignment);
    refuse(std::string(name) + " begins " + std::to_string(offset) + " bytes past a multiple of " +
           bytes + ", must be aligned to " + bytes + " bytes");
  }
}

}  // namespace sonicmoe::checks
