// The biases of all experts, as epilogues and sums read them.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda {

/// One vector for every expert; strides in elements. Null: no bias.
struct Bias {
  const void* data;
  std::int64_t expert_stride;
  std::int64_t column_stride;
};

}  // namespace sonicmoe::cuda
