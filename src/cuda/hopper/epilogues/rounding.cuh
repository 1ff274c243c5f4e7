// Rounds the accumulator to 64-column blocks in the element type, with a bias and row scales from
// shared memory.
#pragma once

#include "cuda/hopper/engine/staging.cuh"
#include "cuda/math/bias.h"
#include "cuda/math/fragment.cuh"

namespace sonicmoe::cuda {

/// Accumulator columns that a bias belongs to: first, first + step, ...
struct BiasColumns {
  int first;
  int step;
  int count;
};

/// Copies the biases of the output columns from `column` on to the accumulator columns `columns` in
/// shared memory; columns from `width` on get 0. The caller syncs. Shared memory, because an
/// unrolled epilogue has no registers for biases. They are added when the accumulator is rounded:
/// if instructions other than wgmma wrote the accumulator, ptxas would serialise the products
/// (C7515).
template <TileShape kShape>
__device__ __forceinline__ void stage_bias(const Staging<kShape>& staging, const Bias& bias,
                                           int expert, int column, int width, BiasColumns columns) {
  const auto* data = static_cast<const std::uint16_t*>(bias.data) + expert * bias.expert_stride;
  for (int i = threadIdx.x & 127; i < columns.count; i += kWarpgroup) {
    const int c = column + i;
    staging.set_bias(columns.first + i * columns.step,
                     c < width ? __ldg(data + c * bias.column_stride) : 0);
  }
}

/// Whether a bias was staged. Without one, neither its loads nor its additions are executed.
enum class BiasUse { kNone, kStaged };

/// Rounds the 64 accumulator columns from `column` on.
template <class Element, BiasUse kBias, TileShape kShape>
__device__ __forceinline__ void round_block(Fragment& block, const float* acc,
                                            const Staging<kShape>& staging, int column) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if constexpr (kBias == BiasUse::kNone) {
      round_words<Element>(block + 2 * i, acc + 4 * i);
    } else {
      round_words<Element>(block + 2 * i, acc + 4 * i, staging.bias_pair(column + i * 8));
    }
  }
}

/// As round_block with a staged bias; each row is scaled before it is rounded.
template <class Element, TileShape kShape>
__device__ __forceinline__ void round_scaled_block(Fragment& block, const float* acc,
                                                   const Staging<kShape>& staging, int column,
                                                   int row_block) {
  const float first = staging.row_scale(row_block, 0);
  const float second = staging.row_scale(row_block, 1);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    round_words<Element>(block + 2 * i, acc + 4 * i, staging.bias_pair(column + i * 8), first,
                         second);
  }
}

}  // namespace sonicmoe::cuda
