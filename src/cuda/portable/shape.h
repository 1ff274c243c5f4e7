// The tiles of the portable engine and their shared memory, for host and device.
//
// A warp computes 64 x 64 elements of D: 128 accumulators a thread, as many as its registers can
// hold.
//
//   | tile of a CTA | warps | CTAs a multiprocessor | for                                         |
//   | 128 x 128     | 4     | 2                     | dH with n <= 128: a wide tile would compute |
//   |               |       |                       | half of its columns in vain                 |
//   | 128 x 256     | 8     | 1                     | all other products                          |
//
// With narrow tiles the epilogue of one CTA runs beside the products of the other CTA. But the
// narrow tile reads more bytes a flop from L2: plain products with long rows are 10 % slower (H200,
// hot).
#pragma once

#include <cstdint>

#include "cuda/math/column_order.h"

namespace sonicmoe::cuda::portable {

/// Columns of a CTA's tile.
enum class Width : int { k128 = 128, k256 = 256 };

inline constexpr int kTileRows = 128;
inline constexpr int kWarpRows = 64;
inline constexpr int kWarpColumns = 64;

inline constexpr int kElementBytes = 2;
/// Elements of K in a pipeline stage.
///
///   | depth | shared memory   | where the wide tile has it                                 |
///   |       | wide   | narrow |                                                            |
///   | 64    | 163 KB | 106 KB | 8.0, 8.7, 9.0, 10.x, 11.0. It needs half as many waits and |
///   |       |        |        | is 4 to 20 % faster (H200)                                 |
///   | 32    | 91 KB  | 58 KB  | 8.6, 8.9, 12.x: a CTA has at most 99 KB                    |
///
/// The narrow tile has depth 64 on 9.0, and 32 on 8.0 and 8.7. 8.6, 8.9 and 12.x have no room for
/// two CTAs. They, 10.x and 11.0 take the wide tile for every product.
enum class Depth : int { k32 = 32, k64 = 64 };

/// The arguments of the template Shape, as values at run time.
struct TileShape {
  Depth depth;
  Width width;
};

/// Whether code compiled for a compute capability (major * 10 + minor) has the kernels of a shape.
/// Code for less than 10.0 has both depths: code for 8.0 also runs on 8.6 and 8.9, and the tests
/// run both depths on 9.0. Code for 10.0 has no narrow tile, because it would spill registers.
constexpr bool is_compiled(const TileShape& shape, int capability) {
  if (capability < 100) return true;
  return shape.width == Width::k256 && shape.depth == (capability < 120 ? Depth::k64 : Depth::k32);
}

/// The only shape of products of packed weights.
inline constexpr TileShape kPackedShape{Depth::k32, Width::k256};

/// Stages of the operand pipeline. Four stages are not faster (H200).
inline constexpr int kStages = 3;

/// The shape of a CTA's tile of D and of its pipeline stages.
template <Depth kOfStage, Width kOfTile>
struct Shape {
  static constexpr TileShape kShape{kOfStage, kOfTile};
  static constexpr int kColumns = static_cast<int>(kOfTile);
  /// Chunks of 16 bytes in a row of the tile.
  static constexpr int kColumnChunks = kColumns * kElementBytes / 16;
  static constexpr int kWarpsAlongColumns = kColumns / kWarpColumns;
  static constexpr int kWarps = kTileRows / kWarpRows * kWarpsAlongColumns;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kCtas = 256 / kColumns;  ///< of a multiprocessor

  /// A stage has kTileRows lines of A, then kColumns lines of B. Sizes of lines are those of
  /// K-major operands.
  static constexpr int kDepth = static_cast<int>(kOfStage);
  static constexpr int kLineBytes = kDepth * kElementBytes;
  static constexpr int kLineChunks = kLineBytes / 16;
  static constexpr int kBytesA = kTileRows * kLineBytes;
  static constexpr int kBytes = (kTileRows + kColumns) * kLineBytes;
  /// Copies of 16 bytes that a thread issues for a stage.
  static constexpr int kCopies = (kTileRows + kColumns) * kLineChunks / kThreads;

  /// Chunk c of a line is stored at c ^ swizzle(line). So the eight lines of an 8x8 matrix have the
  /// same chunk in different banks: lines i to i + 7, or, for weights with ColumnOrder::kByLane,
  /// lines i, i + 1, i + 8, i + 9, i + 16, ...; i is even there.
  template <ColumnOrder kOrder = ColumnOrder::kAscending>
  static constexpr int swizzle(int line) {
    constexpr bool kByLane = kOrder == ColumnOrder::kByLane;
    if (kLineChunks == 8) return kByLane ? (line & 1) | (line >> 2 & 6) : line & 7;
    return kByLane ? line >> 3 & 3 : line >> 1 & 3;
  }
};

/// The staging buffer of a warp (epilogues/staging.cuh).
inline constexpr int kStagingBytes = 2304;

/// The description of a tile: the loader writes it, the main loop and the epilogue read it.
struct TileSlot {
  std::int32_t expert;
  std::int32_t row;      ///< first row of D: in expert order, or in the expert's matrix
  std::int32_t rows;     ///< rows that exist, at most kTileRows
  std::int32_t column;   ///< first column of D
  std::int32_t k_tiles;  ///< 0: there are no more tiles
  std::int32_t summed;   ///< in depth products: rows of the expert, over which D is a sum
  std::int32_t unused[2];
};

/// Tile slots. The most slots are in use at once if every tile has one k tile: one for the tile
/// that the slowest warp stores, one for each tile in the ring, and one for the tile that the
/// loader begins.
inline constexpr int kTileSlots = 8;
static_assert(kTileSlots >= kStages + 2);

inline constexpr int kBarrierBytes = 128;
inline constexpr int kSlotBytes = kTileSlots * static_cast<int>(sizeof(TileSlot));

/// Calls call.template operator()<kDepth, kWidth>() with the values of a TileShape.
template <class Call>
constexpr auto with_shape(const TileShape& shape, const Call& call) {
  const auto of_depth = [&]<Depth kDepth>() {
    return shape.width == Width::k256 ? call.template operator()<kDepth, Width::k256>()
                                      : call.template operator()<kDepth, Width::k128>();
  };
  return shape.depth == Depth::k64 ? of_depth.template operator()<Depth::k64>()
                                   : of_depth.template operator()<Depth::k32>();
}

/// Dynamic shared memory of a CTA: barriers, tile slots, staging buffers, stages.
constexpr int shared_bytes(const TileShape& shape) {
  return with_shape(shape, []<Depth kDepth, Width kWidth>() {
    using S = Shape<kDepth, kWidth>;
    return kBarrierBytes + kSlotBytes + S::kWarps * kStagingBytes + kStages * S::kBytes;
  });
}
constexpr int threads_of(const TileShape& shape) {
  return with_shape(shape,
                    []<Depth kDepth, Width kWidth>() { return Shape<kDepth, kWidth>::kThreads; });
}
constexpr int ctas_each(const TileShape& shape) {
  return with_shape(shape,
                    []<Depth kDepth, Width kWidth>() { return Shape<kDepth, kWidth>::kCtas; });
}
/// Products of packed weights: bytes of a thread's codes, of 32 weights, and of the values of all
/// digits.
inline constexpr int kDigitBytes = 16, kFp8Bytes = 32, kValueBytes = 16 * 4;
/// Their shared memory beyond shared_bytes().
inline constexpr int kDigitsMore = threads_of(kPackedShape) * kDigitBytes + kValueBytes;
inline constexpr int kFp8More = threads_of(kPackedShape) * kFp8Bytes;
static_assert(shared_bytes(kPackedShape) + kDigitsMore <= 99 * 1024);
static_assert(shared_bytes(kPackedShape) + kFp8More <= 99 * 1024);
static_assert(shared_bytes({Depth::k32, Width::k256}) <= 99 * 1024);
static_assert(shared_bytes({Depth::k64, Width::k256}) <= 163 * 1024);

}  // namespace sonicmoe::cuda::portable
