// The arguments of the kernels. Plain C++: the host fills them, the kernels read them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/blackwell/shape.h"
#include "cuda/metadata/tile_record.h"

namespace sonicmoe::cuda::blackwell {

/// A time limit of every wait for an mbarrier. If one wait exceeds it, that wait and all later ones
/// of the grid return false: the kernel ends, without a result. A launch with a limit has static
/// order: waits for the queue of tile indices have none.
struct WaitLimit {
  std::uint64_t nanoseconds;
  std::int32_t* exceeded;  ///< 0 before the launch, set to 1 by a wait that ran out; null: no limit
};

/// A part of K: rows of A and the columns of B that they are multiplied by.
struct Segment {
  CUtensorMap rows;        ///< (k, row), box 64 x 1
  CUtensorMap columns[2];  ///< (k, column, expert) or (column, k, expert), box 64 x 64 x 1
  std::int32_t k_tiles;
  std::int32_t ordered;  ///< 1: row p is row p; 0: row p is row index[p]
};

/// What the two halves of a tile's columns are.
enum class Halves : std::int32_t {
  kOneMatrix,   ///< neighbouring columns of one matrix
  kInEachCta,   ///< each CTA loads 64 columns of gate, then the same 64 columns of up
  kInEachPair,  ///< the even CTA loads 128 columns of gate, the odd one the same 128 columns of up
};

/// The matrices of gate and up one after the other, then a low-rank term.
inline constexpr int kMostSegments = 3;

/// The types of A and B in an instruction descriptor: bf16, or else fp16.
inline constexpr std::uint32_t kBrainTypes = 1 << 7 | 1 << 10;
/// In an instruction descriptor: the rows of A, or the columns of B, are contiguous, not K.
inline constexpr std::uint32_t kMnMajorA = 1 << 15;
inline constexpr std::uint32_t kMnMajorB = 1 << 16;

struct RowTilesParams {
  const TileRecord* records;
  const std::int32_t* record_count;
  const std::int32_t* index;  ///< row of A for row p in expert order; null: p itself
  std::int32_t columns;       ///< of one matrix
  std::int32_t column_tiles;
  std::int32_t column_step;  ///< columns of one matrix in a tile
  Halves halves;
  std::int32_t has_tails;  ///< 1: a tile of at most 128 rows has 64 rows in each CTA
  std::uint32_t operands;  ///< kBrainTypes and kMnMajorB, or 0
  std::int32_t segments;
  std::int32_t k_tiles;    ///< of all segments
  unsigned* tile_counter;  ///< 0 before the launch; null: static order
  WaitLimit limit;
};

/// The operands of a depth product are the gathered rows and rows in expert order. One of them is
/// A, the other is B.
struct DepthOperands {
  CUtensorMap gathered;  ///< (column, row), box 64 x 1
  CUtensorMap ordered;   ///< (column, row), box 64 x 1
  CUtensorMap boxes;     ///< the rows in expert order again: (column, row, 0), box 64 x 64 x 1
};

/// The tiles of a depth product: a matrix for each expert, summed over its rows.
struct DepthTilesParams {
  const ExpertRecord* longest_first;  ///< null: experts in their own order
  const std::int32_t* expert_begin;
  const std::int32_t* expert_rows;
  const std::int32_t* index;  ///< row of the gathered operand for row p in expert order; null: p
  std::int32_t experts;
  std::int32_t rows;     ///< of D
  std::int32_t columns;  ///< of D
  std::int32_t row_tiles;
  std::int32_t column_tiles;
  std::int32_t gathers_b;  ///< 1: the gathered operand is B
  std::uint32_t operands;  ///< kMnMajorA, kMnMajorB, and kBrainTypes or 0
  unsigned* tile_counter;  ///< 0 before the launch; null: static order
  WaitLimit limit;
};

/// When the tiles of a kernel may begin. Every kernel waits for the kernel before it, and then lets
/// the next one start; so the rules of ptx/dependent.cuh hold.
enum class Begins : std::int32_t {
  kAfterPrevious,  ///< after the previous kernel
  kIndependent,    ///< at once: no tile reads what the previous kernel writes. Loads are by
                   ///< ld.global, not by ld.global.nc, and loads by TMA follow a fence.proxy.async.
                   ///< Of the epilogues only StoreExpert, and Store without bias and scales. For
                   ///< the others (kMayBeginAtOnce is false) it means kAfterPrevious
};

/// The order of launches. The kernels' names are those of ptx/dependent.cuh.
struct LaunchOrder {
  Begins begins;
  /// kIndependent: rows may be read once this count is not 0; null: at once.
  const unsigned* arrival;
};

template <class EpilogueParams>
struct RowProductParams {
  Segment segments[kMostSegments];
  RowTilesParams tiles;
  LaunchOrder order;
  EpilogueParams epilogue;
};

/// The scales of the codes of a product's rows and weights. Strides count scales.
struct CodeScales {
  const float* rows;
  std::int64_t row_stride;
  std::int64_t row_block_stride;  ///< from a block of K to the next one
  const float* weights;
  std::int64_t expert_stride;
  std::int64_t column_stride;  ///< from a block of columns to the next one
  std::int64_t half_stride;    ///< from the first half of a tile's columns to the second one
  std::int64_t depth_stride;   ///< from a block of K to the next one
};

template <class EpilogueParams>
struct CodesProductParams {
  Segment segments[1];
  RowTilesParams tiles;
  LaunchOrder order;
  CodeScales scales;
  EpilogueParams epilogue;
};

template <class EpilogueParams>
struct DepthProductParams {
  DepthOperands operands;
  DepthTilesParams tiles;
  LaunchOrder order;
  EpilogueParams epilogue;
};

}  // namespace sonicmoe::cuda::blackwell
