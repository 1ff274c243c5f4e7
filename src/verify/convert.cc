#include "verify/convert.h"

#include <cstring>

#include "core/numeric.h"

namespace sonicmoe::oracle {
namespace {

template <class T>
T get(const void* data, std::int64_t offset) {
  T value;
  std::memcpy(&value,
              static_cast<const char*>(data) + offset * static_cast<std::int64_t>(sizeof(T)),
              sizeof(T));
  return value;
}

template <class T>
void put(void* data, std::int64_t offset, T value) {
  std::memcpy(static_cast<char*>(data) + offset * static_cast<std::int64_t>(sizeof(T)), &value,
              sizeof(T));
}

// double to float by "round to odd": a following rounding to 16 bits then gives the same value as a
// single rounding from double.
float to_float_odd(double v) {
  const float nearest = static_cast<float>(v);
  if (static_cast<double>(nearest) == v || !std::isfinite(v) || !std::isfinite(nearest)) {
    return nearest;
  }
  const float toward = std::abs(static_cast<double>(nearest)) > std::abs(v)
                           ? std::nextafterf(nearest, 0.0f)
                           : nearest;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(toward) | 1u);
}

}  // namespace

double round_to(DType dtype, double v) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<float>(v);
    case DType::kBF16:
      return to_float(to_bf16(to_float_odd(v)));
    case DType::kF16:
      return to_float(to_f16(to_float_odd(v)));
    default:
      return v;
  }
}

std::int64_t element_count(const Tensor& t) {
  std::int64_t count = 1;
  for (std::int32_t i = 0; i < t.rank; ++i) count *= t.shape[i];
  return count;
}

std::int64_t element_offset(const Tensor& t, std::int64_t index) {
  std::int64_t offset = 0;
  for (std::int32_t i = t.rank - 1; i >= 0; --i) {
    offset += index % t.shape[i] * t.stride[i];
    index /= t.shape[i];
  }
  return offset;
}

double load(const void* data, DType dtype, std::int64_t offset) {
  switch (dtype) {
    case DType::kF32:
      return get<float>(data, offset);
    case DType::kBF16:
      return to_float(get<BF16>(data, offset));
    case DType::kF16:
      return to_float(get<F16>(data, offset));
    case DType::kF64:
      return get<double>(data, offset);
    case DType::kI32:
      return get<std::int32_t>(data, offset);
    case DType::kI64:
      return static_cast<double>(get<std::int64_t>(data, offset));
  }
  throw Error(Status::kInvalidArgument, "dtype is out of range, must be 0 to 5");
}

void store(void* data, DType dtype, std::int64_t offset, double value) {
  switch (dtype) {
    case DType::kF32:
      return put(data, offset, static_cast<float>(value));
    case DType::kBF16:
      return put(data, offset, to_bf16(to_float_odd(value)));
    case DType::kF16:
      return put(data, offset, to_f16(to_float_odd(value)));
    case DType::kF64:
      return put(data, offset, value);
    case DType::kI32:
      return put(data, offset, static_cast<std::int32_t>(value));
    case DType::kI64:
      return put(data, offset, static_cast<std::int64_t>(value));
  }
  throw Error(Status::kInvalidArgument, "dtype is out of range, must be 0 to 5");
}

// The elements of a tensor along its last axis.
struct Run {
  std::size_t count;
  std::int64_t stride;
};

Run run_of(const Tensor& t) {
  if (t.rank == 0) return {1, 0};
  return {static_cast<std::size_t>(t.shape[t.rank - 1]), t.stride[t.rank - 1]};
}

std::int64_t load_integer(const Tensor& t, std::int64_t index) {
  const std::int64_t offset = element_offset(t, index);
  return t.dtype == DType::kI64 ? get<std::int64_t>(t.data, offset)
                                : get<std::int32_t>(t.data, offset);
}

std::vector<double> read(const Tensor& t) {
  std::vector<double> values(static_cast<std::size_t>(element_count(t)));
  const Run run = run_of(t);
  for (std::size_t i = 0; i < values.size(); i += run.count) {
    const std::int64_t first = element_offset(t, static_cast<std::int64_t>(i));
    for (std::size_t j = 0; j < run.count; ++j) {
      values[i + j] = load(t.data, t.dtype, first + static_cast<std::int64_t>(j) * run.stride);
    }
  }
  return values;
}

void write(const Tensor& t, const std::vector<double>& values) {
  const Run run = run_of(t);
  for (std::size_t i = 0; i < values.size(); i += run.count) {
    const std::int64_t first = element_offset(t, static_cast<std::int64_t>(i));
    for (std::size_t j = 0; j < run.count; ++j) {
      store(t.data, t.dtype, first + static_cast<std::int64_t>(j) * run.stride, values[i + j]);
    }
  }
}

}  // namespace sonicmoe::oracle
