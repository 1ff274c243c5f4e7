// The (T, K) lists of top-k as kernels see them.
#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// The (T, K) outputs, or inputs of the gradient.
struct SlotsView {
  void* ids;
  std::int64_t id_stride[2];
  float* weights;
  std::int64_t weight_stride[2];
  std::int32_t wide;  ///< 1: ids are i64

  __device__ void set_id(std::int64_t t, int k, int id) const {
    const std::int64_t i = t * id_stride[0] + k * id_stride[1];
    if (wide != 0) {
      static_cast<std::int64_t*>(ids)[i] = id;
    } else {
      static_cast<std::int32_t*>(ids)[i] = id;
    }
  }
  /// Compared as 64 bits; -1 where no expert is named.
  __device__ int id(std::int64_t t, int k, int experts) const {
    const std::int64_t i = t * id_stride[0] + k * id_stride[1];
    const std::int64_t e = wide != 0 ? static_cast<const std::int64_t*>(ids)[i]
                                     : static_cast<const std::int32_t*>(ids)[i];
    return e < 0 || e >= experts ? -1 : static_cast<int>(e);
  }
  __device__ float& weight(std::int64_t t, int k) const {
    return weights[t * weight_stride[0] + k * weight_stride[1]];
  }
};

inline SlotsView slots_of(const Tensor& ids, const Tensor& weights) {
  return {ids.data,
          {ids.stride[0], ids.stride[1]},
          static_cast<float*>(weights.data),
          {weights.stride[0], weights.stride[1]},
          ids.dtype == DType::kI64 ? 1 : 0};
}

}  // namespace sonicmoe::cuda
