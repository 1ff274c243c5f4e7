// Reads and writes elements of strided tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/numeric.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cpu {

template <class T>
T& element(const Tensor& t, std::int64_t i) {
  return static_cast<T*>(t.data)[i * t.stride[0]];
}
template <class T>
T& element(const Tensor& t, std::int64_t i, std::int64_t j) {
  return static_cast<T*>(t.data)[i * t.stride[0] + j * t.stride[1]];
}

/// An element of an i32 or i64 tensor.
inline std::int64_t index_at(const Tensor& t, std::int64_t i) {
  return t.dtype == DType::kI64 ? element<std::int64_t>(t, i) : element<std::int32_t>(t, i);
}
inline std::int64_t index_at(const Tensor& t, std::int64_t i, std::int64_t j) {
  return t.dtype == DType::kI64 ? element<std::int64_t>(t, i, j) : element<std::int32_t>(t, i, j);
}
inline void set_index(const Tensor& t, std::int64_t i, std::int64_t j, std::int64_t value) {
  if (t.dtype == DType::kI64) {
    element<std::int64_t>(t, i, j) = value;
  } else {
    element<std::int32_t>(t, i, j) = static_cast<std::int32_t>(value);
  }
}

/// Writes fp64 values to row i of a float tensor. Values for 16-bit tensors are rounded to fp32
/// first.
inline void store_row(const Tensor& t, std::int64_t i, const double* values, std::int64_t n) {
  switch (t.dtype) {
    case DType::kF64:
      for (std::int64_t j = 0; j < n; ++j) element<double>(t, i, j) = values[j];
      break;
    case DType::kBF16:
      for (std::int64_t j = 0; j < n; ++j) {
        element<BF16>(t, i, j) = to_bf16(static_cast<float>(values[j]));
      }
      break;
    case DType::kF16:
      for (std::int64_t j = 0; j < n; ++j) {
        element<F16>(t, i, j) = to_f16(static_cast<float>(values[j]));
      }
      break;
    default:
      for (std::int64_t j = 0; j < n; ++j) {
        element<float>(t, i, j) = static_cast<float>(values[j]);
      }
  }
}

}  // namespace sonicmoe::cpu
