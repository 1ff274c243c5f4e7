// The biases of all experts, as kernels take them.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda {

/// One bias vector for each expert. Strides count elements. `data` is null if there is no bias.
struct Bias {
  const void* data;
  std::int64_t expert_stride;
  std::int64_t column_stride;
};

}  // namespace sonicmoe::cuda
