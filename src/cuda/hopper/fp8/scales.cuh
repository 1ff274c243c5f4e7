// Scales in the main loop: those of rows lie in the stage, those of weights in registers of a warp.
#pragma once

#include "cuda/hopper/fp8/consumer_tiles.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda {

/// Row scales of a stage: 128 floats; by TMA up to three more before the tile's first row.
__device__ __forceinline__ std::uint32_t row_scales(const Fp8Cta& cta, int stage) {
  return cta.base + Fp8SharedLayout::kRowScales + stage * Fp8SharedLayout::kStageScales;
}

/// The weights' scales of a consumer warp's tile, kWeightScaleTiles k tiles at a time, in shared
/// memory. Those of the next tile arrive under the epilogue.
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
  /// Until the loads have landed, for the whole warp.
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
