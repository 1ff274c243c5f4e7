// The arguments of the kernels. Plain C++: the host fills them, the kernels read them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/blackwell/shape.h"
#include "cuda/metadata/tile_record.h"

namespace sonicmoe::cuda::blackwell {

/// A part of K: rows of A and the columns of B that they are multiplied by.
struct Segment {
  CUtensorMap rows;        ///< (k, row), box 64 x 1
  CUtensorMap columns[2];  ///< (k, column, expert) or (column, k, expert), box 64 x 64 x 1
  std::int32_t k_tiles;
  std::int32_t ordered;  ///< 1: row p is row p; 0: row p is row index[p]
};

/// The matrices of gate and up one after the other, then a low-rank term.
inline constexpr int kMostSegments = 3;

/// The types of A and B in an instruction descriptor: bf16, and fp16.
inline constexpr std::int32_t kBrainTypes = 1 << 7 | 1 << 10;
inline constexpr std::int32_t kHalfTypes = 0;

struct RowTilesParams {
  const TileRecord* records;
  const std::int32_t* record_count;
  const std::int32_t* index;  ///< row of A for row p in expert order; null: p itself
  std::int32_t columns;       ///< of one matrix
  std::int32_t column_tiles;
  std::int32_t column_step;  ///< columns of one matrix in a tile
  std::int32_t halves;       ///< 1: a tile has columns of both matrices (gate and up)
  std::int32_t mn_major;     ///< 1: the columns of B are contiguous, not its K
  std::int32_t types;        ///< kBrainTypes or kHalfTypes
  std::int32_t segments;
};

template <class EpilogueParams>
struct RowProductParams {
  Segment segments[kMostSegments];
  RowTilesParams tiles;
  EpilogueParams epilogue;
};

}  // namespace sonicmoe::cuda::blackwell
