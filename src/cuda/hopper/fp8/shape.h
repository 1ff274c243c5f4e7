// The tile of FP8 products and its shared memory. Plain C++: host and kernels share it.
//
// A k tile has 128 codes of one byte along K, with one scale for each row. These 128 bytes are as
// many as the 64 elements of a 16-bit k tile. So the FP8 kernels use the stages, tensor maps and
// loads of B of the 16-bit engine. That engine sees two codes as one 16-bit word: it counts K,
// columns of codes and row lengths in words.
#pragma once

#include "cuda/hopper/engine/shape.h"

namespace sonicmoe::cuda {

inline constexpr int kFp8Block = 128;  // codes that share a scale, along K and along N
inline constexpr int kFp8Units = 2;    // units in a tile; a unit has 128 columns

// 128 x 256, 3 stages, cluster of 2, 4 store boxes. Each of the two consumer warpgroups has 64
// rows. It multiplies one unit (64 x 128) after the other and adds the products, times their
// scales, to 128 fp32 registers per thread. The tensor cores need 1024 clocks for a stage, so three
// stages are enough. Then boxes for a whole tile of Y or dX~, or for the H that dH reads, fit into
// shared memory. Four stages with half as many boxes are 3 to 8 % slower (H200).
inline constexpr TileShape kFp8Tile{128, 256, 3, 2, 4, Schedule::kCooperative};

/// Rows in a TMA box of row scales: the rows of the tile, up to three rows before them, and at
/// least one after them. The box begins at a multiple of four rows (16 bytes), and its number of
/// rows is a multiple of four.
inline constexpr int kFp8ScaleRows = kFp8Tile.m + 4;

/// Cards in shared memory. A card is the description of one tile (tile_cards.cuh).
inline constexpr int kFp8Cards = 8;

/// Shared memory of a CTA: first the arrays of the 16-bit kernels (SharedLayout), then the arrays
/// that only FP8 kernels have.
struct Fp8SharedLayout {
  using Base = SharedLayout<kFp8Tile>;
  static constexpr int kAlign = 128;  // required by TMA
  /// The scales of a stage: first kFp8ScaleRows row scales, then one weight scale for each unit.
  static constexpr int kStageWeights = kFp8ScaleRows * 4;
  static constexpr int kStageScales =
      (kStageWeights + kFp8Units * 4 + kAlign - 1) / kAlign * kAlign;
  static constexpr int kScales = (Base::kEnd + kAlign - 1) / kAlign * kAlign;
  /// Scales of the kept H, which dH reads, for each warpgroup: (unit, gate or up, row).
  static constexpr int kInputScales = kScales + kFp8Tile.stages * kStageScales;
  static constexpr int kInputScaleBytes = kFp8Units * 2 * 64 * 4;
  static constexpr int kCards = kInputScales + kConsumers * kInputScaleBytes;
  static constexpr int kCardBytes = 16;
  /// The state that ConsumerTiles keeps for each consumer warp.
  static constexpr int kWarpStates = kCards + kFp8Cards * kCardBytes;
  static constexpr int kWarpStateBytes = 16;
  static constexpr int kCardFull = kWarpStates + kConsumers * 4 * kWarpStateBytes;
  static constexpr int kInputFull = kCardFull + kFp8Cards * 8;  ///< of each consumer warp
  static constexpr int kEnd = kInputFull + kConsumers * 4 * 8;
  static_assert(kEnd <= 232448, "more shared memory than a CTA of sm_90 has");
};

}  // namespace sonicmoe::cuda
