// The tile of FP8 products and its shared memory. Plain C++: host and kernels share it.
//
// A k tile has 128 codes of one byte, with one scale for each row. The codes have as many bytes as
// the 64 elements of a 16-bit k tile. So the code of the 16-bit engine for stages, tensor maps and
// loads of B is used here too. It takes two codes as one 16-bit word: K, columns of codes and row
// lengths are counted in words.
#pragma once

#include "cuda/hopper/engine/shape.h"

namespace sonicmoe::cuda {

inline constexpr int kFp8Block = 128;  // codes that share a scale, along K and along N
inline constexpr int kFp8Units = 2;    // a unit: 128 columns of a tile

// Two warpgroups of 64 rows. Each multiplies units of 64 x 128 and adds them, times their scales,
// to 128 fp32 registers a thread. The tensor cores need 1024 clocks for a stage, so three stages
// are enough, and store boxes for a whole tile fit into shared memory: 3 to 8 % faster than four
// stages and half of the boxes (H200).
inline constexpr TileShape kFp8Tile{128, 256, 3, 2, 4, Schedule::kCooperative};

/// Rows in a box of row scales: the rows of the tile and up to three rows before them, because a
/// TMA box begins at a multiple of four rows (16 bytes) and has a multiple of four rows.
inline constexpr int kFp8ScaleRows = kFp8Tile.m + 4;

/// Tiles whose cards (tile_cards.cuh) are in shared memory.
inline constexpr int kFp8Cards = 8;

/// Shared memory of a CTA: first as in the 16-bit kernels, then the arrays of FP8.
struct Fp8SharedLayout {
  using Base = SharedLayout<kFp8Tile>;
  static constexpr int kAlign = 128;  // required by TMA
  /// The scales of a stage: of kFp8ScaleRows rows, then of the weights of each unit.
  static constexpr int kStageWeights = kFp8ScaleRows * 4;
  static constexpr int kStageScales =
      (kStageWeights + kFp8Units * 4 + kAlign - 1) / kAlign * kAlign;
  static constexpr int kScales = (Base::kEnd + kAlign - 1) / kAlign * kAlign;
  /// Scales of H for each warpgroup: (unit, part, row).
  static constexpr int kInputScales = kScales + kFp8Tile.stages * kStageScales;
  static constexpr int kInputScaleBytes = kFp8Units * 2 * 64 * 4;
  static constexpr int kCards = kInputScales + kConsumers * kInputScaleBytes;
  static constexpr int kCardBytes = 16;
  /// The state of ConsumerTiles of each consumer warp.
  static constexpr int kWarpStates = kCards + kFp8Cards * kCardBytes;
  static constexpr int kWarpStateBytes = 16;
  static constexpr int kCardFull = kWarpStates + kConsumers * 4 * kWarpStateBytes;
  static constexpr int kInputFull = kCardFull + kFp8Cards * 8;
  static constexpr int kEnd = kInputFull + kConsumers * 8;
  static_assert(kEnd <= 232448, "more shared memory than a CTA of sm_90 has");
};

}  // namespace sonicmoe::cuda
