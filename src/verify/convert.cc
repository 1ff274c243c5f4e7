#include "verify/convert.h"

#include <algorithm>
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
  const double back = static_cast<double>(nearest);
  if (back == v || !std::isfinite(v) || !std::isfinite(nearest)) return nearest;
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  // One less is the neighbour nearer to zero.
  return std::bit_cast<float>((bits - (std::abs(back) > std::abs(v) ? 1u : 0u)) | 1u);
}

// The value of type T nearest to v. Integers must be in T's range.
template <class T>
T nearest(double v) {
  return static_cast<T>(v);
}
template <>
BF16 nearest<BF16>(double v) {
  return to_bf16(to_float_odd(v));
}
template <>
F16 nearest<F16>(double v) {
  return to_f16(to_float_odd(v));
}
template <class T>
T nearest(float v) {
  return from_float<T>(v);
}

double widened(BF16 v) { return to_float(v); }
double widened(F16 v) { return to_float(v); }
template <class T>
double widened(T v) {
  return static_cast<double>(v);
}

// Calls f with the C++ type of `dtype`.
template <class F>
auto with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kF32:
      return f.template operator()<float>();
    case DType::kBF16:
      return f.template operator()<BF16>();
    case DType::kF16:
      return f.template operator()<F16>();
    case DType::kF64:
      return f.template operator()<double>();
    case DType::kI32:
      return f.template operator()<std::int32_t>();
    case DType::kI64:
      return f.template operator()<std::int64_t>();
  }
  throw Error(Status::kInvalidArgument, "dtype is out of range, must be 0 to 5");
}

// Calls f(number, offset) for each element of t, in row-major order.
template <class F>
void each_element(const Tensor& t, F f) {
  const std::int64_t count = element_count(t);
  const std::int64_t run = t.rank == 0 ? 1 : t.shape[t.rank - 1];
  const std::int64_t stride = t.rank == 0 ? 0 : t.stride[t.rank - 1];
  for (std::int64_t i = 0; i < count; i += run) {
    const std::int64_t first = element_offset(t, i);
    for (std::int64_t j = 0; j < run; ++j) f(i + j, first + j * stride);
  }
}

}  // namespace

double round_to(DType dtype, double v) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<float>(v);
    case DType::kBF16:
      return to_float(nearest<BF16>(v));
    case DType::kF16:
      return to_float(nearest<F16>(v));
    default:
      return v;
  }
}

template <class Real>
void round_all(DType dtype, std::vector<Real>& values) {
  const auto round = [&]<class T>() {
    for (Real& v : values) v = static_cast<Real>(widened(nearest<T>(v)));
  };
  if constexpr (sizeof(Real) <= sizeof(double)) {
    if (dtype == DType::kF32) round.template operator()<float>();
    if (dtype == DType::kBF16) round.template operator()<BF16>();
    if (dtype == DType::kF16) round.template operator()<F16>();
  }
}
template void round_all(DType, std::vector<float>&);
template void round_all(DType, std::vector<double>&);
template void round_all(DType, std::vector<long double>&);

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

Tensor slice(const Tensor& t, std::int64_t index) {
  Tensor part = t;
  part.data = static_cast<std::uint8_t*>(t.data) + index * t.stride[0] * dtype_bytes(t.dtype);
  part.rank = t.rank - 1;
  std::copy(t.shape + 1, t.shape + t.rank, part.shape);
  std::copy(t.stride + 1, t.stride + t.rank, part.stride);
  return part;
}

double load(const void* data, DType dtype, std::int64_t offset) {
  return with_type(dtype, [&]<class T>() { return widened(get<T>(data, offset)); });
}

void store(void* data, DType dtype, std::int64_t offset, double value) {
  with_type(dtype, [&]<class T>() { put(data, offset, nearest<T>(value)); });
}

std::int64_t load_integer(const Tensor& t, std::int64_t index) {
  const std::int64_t offset = element_offset(t, index);
  return t.dtype == DType::kI64 ? get<std::int64_t>(t.data, offset)
                                : get<std::int32_t>(t.data, offset);
}

std::vector<double> read(const Tensor& t) {
  std::vector<double> values(static_cast<std::size_t>(element_count(t)));
  with_type(t.dtype, [&]<class T>() {
    each_element(t, [to = values.data(), from = t.data](std::int64_t i, std::int64_t offset) {
      to[i] = widened(get<T>(from, offset));
    });
  });
  return values;
}

void write(const Tensor& t, const std::vector<double>& values) {
  with_type(t.dtype, [&]<class T>() {
    each_element(t, [to = t.data, from = values.data()](std::int64_t i, std::int64_t offset) {
      put(to, offset, nearest<T>(from[i]));
    });
  });
}

}  // namespace sonicmoe::oracle
