// Reads the biases for a word, which holds two columns.
#pragma once

#include <cstdint>

#include "cuda/math/bias.h"
#include "cuda/portable/epilogues/columns.cuh"
#include "cuda/portable/params.h"

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

/// The biases of a word of H. `within` is the tile's column at which it begins; `half` is 1 if this
/// column is in the second half of the tile (Columns::kHalves).
template <GateLayout kLayout>
__device__ __forceinline__ std::uint32_t hidden_bias(const ActivateParams& p, const TileSlot& tile,
                                                     int within, int half) {
  if constexpr (kLayout == GateLayout::kConcatenated) {
    const int column = tile.column + within % kHalfColumns;
    return bias_word(p.bias[half], tile.expert, column, p.act.width);
  }
  if constexpr (kLayout == GateLayout::kNone) {
    return bias_word(p.bias[0], tile.expert, tile.column + within, p.act.width);
  }
  const int column = (tile.column + within) / 2;
  return bias_of(p.bias[0], tile.expert, column, p.act.width) |
         bias_of(p.bias[1], tile.expert, column, p.act.width) << 16;
}

}  // namespace sonicmoe::cuda::portable
