// The view that kernels have of the caller's routing, one value for each slot.
#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// A tensor (T, K) of experts or weights: slot s is k = s % K of token s / K. A list (C), of pairs
/// or of grouped rows, is seen as (C, 1). Strides are in elements.
struct SlotView {
  void* data;           ///< null: absent
  std::int64_t row;     ///< stride from one token to the next
  std::int64_t column;  ///< stride from one k to the next
  std::int32_t top_k;   ///< K; 1 if all slots have one stride, `column`
  DType dtype;          ///< i32 or i64; f32 for weights

  __device__ std::int64_t offset(std::int64_t token, int k) const {
    return token * row + k * column;
  }
  __device__ std::int64_t offset(std::int64_t slot) const {
    // Slots number less than 2^31; a 64-bit division costs ten times a 32-bit one.
    auto k = static_cast<unsigned>(slot);
    unsigned token = 0;
    if (top_k != 1) {
      token = k / static_cast<unsigned>(top_k);
      k -= token * static_cast<unsigned>(top_k);
    }
    return token * row + k * column;
  }

  /// The integer at an offset, as 64 bits whatever its type.
  __device__ std::int64_t integer(std::int64_t at) const {
    return dtype == DType::kI64 ? static_cast<const std::int64_t*>(data)[at]
                                : static_cast<const std::int32_t*>(data)[at];
  }
  /// The expert at an offset, -1 if the id is outside [0, experts). Ids are compared as 64 bits: an
  /// int64 id names no expert if only its lower 32 bits are a valid id.
  __device__ int expert(std::int64_t at, int experts) const {
    const std::int64_t e = integer(at);
    return e < 0 || e >= experts ? -1 : static_cast<int>(e);
  }
  __device__ void set_expert(std::int64_t at, int expert) const {
    if (dtype == DType::kI64) {
      static_cast<std::int64_t*>(data)[at] = expert;
    } else {
      static_cast<std::int32_t*>(data)[at] = expert;
    }
  }
  __device__ float& weight(std::int64_t at) const { return static_cast<float*>(data)[at]; }
};

inline SlotView slot_view(const Tensor& t) {
  if (t.rank < 2 || t.shape[1] == 1) return {t.data, t.stride[0], t.stride[0], 1, t.dtype};
  const bool even = t.stride[0] == t.shape[1] * t.stride[1];
  return {t.data, t.stride[0], t.stride[1], even ? 1 : static_cast<std::int32_t>(t.shape[1]),
          t.dtype};
}

}  // namespace sonicmoe::cuda
