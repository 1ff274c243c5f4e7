// Reads the biases for a word, which holds two columns.
#pragma once

#include <cstdint>

#include "cuda/math/bias.h"

namespace sonicmoe::cuda::portable {

/// The 16-bit bias of a column, 0 past the last column.
__device__ __forceinline__ std::uint32_t bias_of(const Bias& bias, int expert, int column,
                                                 int columns) {
  if (column >= columns) return 0;
  return static_cast<const std::uint16_t*>(
      bias.data)[expert * bias.expert_stride + column * bias.column_stride];
}

/// The biases of `column` and of the next column.
__device__ __forceinline__ std::uint32_t bias_word(const Bias& bias, int expert, int column,
                                                   int columns) {
  return bias_of(bias, expert, column, columns) | bias_of(bias, expert, column + 1, columns) << 16;
}

}  // namespace sonicmoe::cuda::portable
