// The biases of all experts, as kernels take them.
#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// One bias vector for each expert. Strides count elements. `data` is null if there is no bias.
struct Bias {
  const void* data;
  std::int64_t expert_stride;
  std::int64_t column_stride;
};

/// A bias (E, columns), which may be absent.
inline Bias bias_of(const Tensor& bias) { return {bias.data, bias.stride[0], bias.stride[1]}; }

}  // namespace sonicmoe::cuda
