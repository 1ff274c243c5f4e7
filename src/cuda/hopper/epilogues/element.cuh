// From the accumulator to blocks in the element type, with biases and scales in shared memory.
#pragma once

#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/math/bias.h"
#include "cuda/math/fragment.cuh"

namespace sonicmoe::cuda {

/// Accumulator columns that a bias is for: first, first + step, ...
struct BiasPlace {
  int first;
  int step;
  int count;
};

/// Puts the bias of output columns column.. of `width` at `place`. Through shared memory, because
/// an unrolled epilogue with 192 accumulators has no registers left to hold biases; the caller
/// syncs.
template <TileShape kShape>
__device__ __forceinline__ void stage_bias(const Staging<kShape>& staging, const Bias& bias,
                                           int expert, int column, int width, BiasPlace place) {
  const auto* data = static_cast<const std::uint16_t*>(bias.data) + expert * bias.expert_stride;
  for (int i = threadIdx.x & 127; i < place.count; i += kWarpgroup) {
    const int c = column + i;
    staging.set_bias(place.first + i * place.step,
                     c < width ? __ldg(data + c * bias.column_stride) : 0);
  }
}

/// As round_block below, each row then scaled (before the one rounding).
template <class Element, TileShape kShape>
__device__ __forceinline__ void round_scaled_block(Fragment& block, const float* acc,
                                                   const Staging<kShape>& staging, int column,
                                                   int half) {
  const float first = staging.row_scale(half, 0);
  const float second = staging.row_scale(half, 1);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    round_words<Element>(block + 2 * i, acc + 4 * i, staging.bias_pair(column + i * 8), first,
                         second);
  }
}

/// Whether a bias was staged: without one, neither its loads nor its additions are paid.
enum class BiasUse { kNone, kStaged };

/// Rounds 64 accumulator columns, bias added, to the element type. The accumulator itself stays as
/// it is: wgmma wants to be its only writer.
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

}  // namespace sonicmoe::cuda
