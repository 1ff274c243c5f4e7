// Biases of the two columns of a word.
#pragma once

#include <cstdint>

#include "cuda/math/bias.h"

namespace sonicmoe::cuda::portable {

/// The 16-bit bias of a column, 0 past the last one.
__device__ __forceinline__ std::uint32_t bias_of(const Bias& bias, int expert, int column,
                                                 int columns) {
  if (column >= columns) return 0;
  return static_cast<const std::uint16_t*>(
      bias.data)[expert * bias.expert_stride + column * bias.column_stride];
}

/// Those of `column` and the next one.
__device__ __forceinline__ std::uint32_t bias_word(const Bias& bias, int expert, int column,
                                                   int columns) {
  return bias_of(bias, expert, column, columns) | bias_of(bias, expert, column + 1, columns) << 16;
}

}  // namespace sonicmoe::cuda::portable
