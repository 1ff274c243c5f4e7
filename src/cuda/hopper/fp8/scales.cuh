// Scales in the main loop. The scales of rows belong to a pipeline stage; the scales of weights are
// in an array of each consumer warp. Both are in shared memory.
#pragma once

#include "cuda/hopper/fp8/consumer_tiles.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda {

/// The address of a stage's row scales, one float for each of 128 rows. If TMA loads them, the
/// scales of up to three earlier rows lie before the scale of the tile's first row.
__device__ __forceinline__ std::uint32_t row_scales(const Fp8Cta& cta, int stage) {
  return cta.base + Fp8SharedLayout::kRowScales + stage * Fp8SharedLayout::kStageScales;
}

/// The scales of the weights for the tile of a consumer warp, for kWeightScaleTiles k tiles at a
/// time. The first scales of the next tile are loaded during the epilogue.
class TileWeightScales {
 public:
  static constexpr int kTiles = Fp8SharedLayout::kWeightScaleTiles;

  __device__ __forceinline__ explicit TileWeightScales(const ConsumerTiles& tiles)
      : at_(tiles.weight_scales()) {}

  /// Starts the loads of the k tiles from `first` on.
  __device__ __forceinline__ void load(const Fp8WeightScales& p, const CtaTile& tile, int k_tiles,
                                       int first) const {
    const int lane = threadIdx.x & 31;
    const int block = tile.column / kFp8Block;
    const float* from =
        p.data + tile.expert * p.expert_stride + static_cast<std::int64_t>(block) * p.column_stride;
#pragma unroll
    for (int i = lane; i < kTiles; i += 32) {
      const int k = first + i;
      if (k >= k_tiles) break;
      const float* value = from + static_cast<std::int64_t>(k) * p.depth_stride;
      ptx::copy4(at_ + i * 4, value);
      if (block + 1 < p.column_blocks) ptx::copy4(at_ + (kTiles + i) * 4, value + p.unit_stride);
    }
  }
  /// Waits until the loads of all lanes have landed.
  __device__ __forceinline__ void wait() const {
    ptx::copies_wait();
    __syncwarp();
  }
  __device__ __forceinline__ float at(int unit, int kt) const {
    return ptx::load_float(at_ + (unit * kTiles + (kt & (kTiles - 1))) * 4);
  }

 private:
  std::uint32_t at_;
};

}  // namespace sonicmoe::cuda
