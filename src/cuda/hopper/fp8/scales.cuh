// The scales of a pipeline stage in shared memory: one for each row, and one weight scale for each
// unit.
#pragma once

#include "cuda/hopper/fp8/params.h"
#include "cuda/hopper/fp8/tile_cards.cuh"
#include "cuda/ptx/copy.cuh"

namespace sonicmoe::cuda {

/// The address of a stage's row scales, one float for each of the tile's 128 rows. If TMA loads
/// them, up to three scales of earlier rows come first (Fp8TmaRows::rows_before()).
__device__ __forceinline__ std::uint32_t row_scales(const Fp8Cta& cta, int stage) {
  return cta.base + Fp8SharedLayout::kScales + stage * Fp8SharedLayout::kStageScales;
}
/// The address of the scales of a stage's weights, one float for each unit.
__device__ __forceinline__ std::uint32_t weight_scales(const Fp8Cta& cta, int stage) {
  return row_scales(cta, stage) + Fp8SharedLayout::kStageWeights;
}

/// Starts the copy of the weight scale of unit `unit` and k tile `kt` into a stage. If the second
/// unit lies past the last column of the matrix, its scale would lie outside the array. So the
/// scale of the first unit is copied instead; results of columns that do not exist are never
/// stored.
__device__ __forceinline__ void copy_weight_scale(const Fp8WeightScales& p, const CtaTile& tile,
                                                  int unit, int kt, const Fp8Cta& cta, int stage) {
  const int block = tile.column / kFp8Block;
  const int second = block + unit < p.column_blocks ? unit * p.unit_stride : 0;
  ptx::copy4(weight_scales(cta, stage) + unit * 4,
             p.data + (tile.expert * p.expert_stride + block * p.column_stride + second +
                       kt * p.depth_stride));
}

}  // namespace sonicmoe::cuda
