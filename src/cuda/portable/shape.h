// The tiles of the portable engine and their shared memory, for host and device.
//
// The 8 warps of a CTA compute 128 x 256 elements of D, each warp 64 x 64: 128 accumulators a
// thread, as many as its registers can hold. A smaller tile reads more bytes a flop from L2: 128 x
// 128 with two CTAs a multiprocessor is 10 % slower (H200, hot).
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::portable {

inline constexpr int kTileRows = 128;
inline constexpr int kTileColumns = 256;
inline constexpr int kWarpRows = 64;
inline constexpr int kWarpColumns = 64;
inline constexpr int kWarpsAlongColumns = kTileColumns / kWarpColumns;
inline constexpr int kWarps = kTileRows / kWarpRows * kWarpsAlongColumns;
inline constexpr int kThreads = kWarps * 32;

inline constexpr int kElementBytes = 2;
/// Chunks of 16 bytes in a row of kTileColumns elements.
inline constexpr int kColumnChunks = kTileColumns * kElementBytes / 16;

/// Elements of K in a pipeline stage.
///
///   | depth | shared memory | where                                                        |
///   | 64    | 163 KB        | 8.0, 8.7, 9.0, 10.x, 11.0. It needs half as many waits and   |
///   |       |               | is 4 to 20 % faster (H200)                                   |
///   | 32    | 91 KB         | 8.6, 8.9, 12.x: a CTA has at most 99 KB                      |
enum class Depth : int { k32 = 32, k64 = 64 };

/// Whether code compiled for a compute capability (major * 10 + minor) has the kernels of a depth.
/// Code for less than 10.0 has both depths: code for 8.0 also runs on 8.6 and 8.9, and the tests
/// run both depths on 9.0.
constexpr bool is_compiled(Depth depth, int capability) {
  if (capability >= 120) return depth == Depth::k32;
  if (capability >= 100) return depth == Depth::k64;
  return true;
}

/// Pipeline stages. Four stages are not faster (H200).
inline constexpr int kStages = 3;

/// A pipeline stage: kTileRows lines of A, then kTileColumns lines of B. Sizes of lines are those
/// of K-major operands.
template <Depth kOfStage>
struct Stage {
  static constexpr int kDepth = static_cast<int>(kOfStage);
  static constexpr int kLineBytes = kDepth * kElementBytes;
  static constexpr int kLineChunks = kLineBytes / 16;
  static constexpr int kBytesA = kTileRows * kLineBytes;
  static constexpr int kBytes = (kTileRows + kTileColumns) * kLineBytes;

  /// Chunk c of a line is stored at c ^ swizzle(line). So eight consecutive lines have the same
  /// chunk in different banks.
  static constexpr int swizzle(int line) { return kLineChunks == 8 ? line & 7 : line >> 1 & 3; }
};

/// The staging buffer of a warp (epilogues/staging.cuh).
inline constexpr int kStagingBytes = 2304;

/// The description of a tile that the loader gives to the main loop and the epilogue.
struct TileSlot {
  std::int32_t expert;
  std::int32_t row;      ///< first row of D: in expert order, or in the expert's matrix
  std::int32_t rows;     ///< rows that exist, at most kTileRows
  std::int32_t column;   ///< first column of D
  std::int32_t k_tiles;  ///< 0: there are no more tiles
  std::int32_t unused[3];
};

/// At least the slots in use at once if every tile has one k tile: one for the tile that the
/// slowest warp stores, those of the tiles in the ring, and one for the tile that the loader
/// begins.
inline constexpr int kTileSlots = 8;
static_assert(kTileSlots >= kStages + 2);

inline constexpr int kBarrierBytes = 128;
inline constexpr int kSlotBytes = kTileSlots * static_cast<int>(sizeof(TileSlot));

/// Dynamic shared memory of a CTA: barriers, tile slots, staging buffers, stages.
constexpr int shared_bytes(Depth depth) {
  const int stage = depth == Depth::k64 ? Stage<Depth::k64>::kBytes : Stage<Depth::k32>::kBytes;
  return kBarrierBytes + kSlotBytes + kWarps * kStagingBytes + kStages * stage;
}
static_assert(shared_bytes(Depth::k32) <= 99 * 1024);
static_assert(shared_bytes(Depth::k64) <= 163 * 1024);

}  // namespace sonicmoe::cuda::portable
