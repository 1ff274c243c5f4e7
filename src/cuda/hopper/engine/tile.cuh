// The interface of tile schedulers: the number of tiles, and the part of tile t that a CTA
// computes.
#pragma once

#include <concepts>

#include "cuda/hopper/engine/pipeline.cuh"
#include "cuda/hopper/params.h"

namespace sonicmoe::cuda {

/// Any valid shape; concepts are checked with it.
inline constexpr TileShape kAnyShape{128, 256, 4, 1, 2, Schedule::kCooperative};

/// One CTA's part of its cluster's tile.
struct CtaTile {
  int expert;
  int row;         ///< the CTA's first row in expert order; the expert's first row where rows are K
  int valid_rows;  ///< output rows from the CTA's first row to the end of the expert (of M where
                   ///< rows are K); may exceed the tile. If the tile is half of a split one, at
                   ///< most the rows of this half. Not positive: the CTA has no rows, and its
                   ///< consumers only release the stages
  int column;      ///< first output column
  int output_row;  ///< where rows are K: first output row of the CTA
  int depth;       ///< where rows are K: rows of the expert
  bool own_b;      ///< the CTA loads all of its B itself: the cluster's other CTA has other columns
};

struct Quotient {
  int quotient;
  int rest;
};

__device__ __forceinline__ Quotient divide(std::uint32_t value, const Divisor& divisor) {
  std::uint32_t quotient = __umulhi(value, divisor.inverse);  // at most one too small
  std::uint32_t rest = value - quotient * divisor.by;
  if (rest >= divisor.by) {
    quotient++;
    rest -= divisor.by;
  }
  return {static_cast<int>(quotient), static_cast<int>(rest)};
}

template <class S>
concept TileScheduler = requires(const typename S::Params& p, int t) {
  { S::k_tiles(p, CtaTile{}) } -> std::same_as<int>;
  { S::kFixedDepth } -> std::convertible_to<bool>;  // all tiles have the same number of k tiles
  { S::kCoherent } -> std::convertible_to<bool>;    // reads nothing by ld.global.nc (Begins)
  { S::template count<kAnyShape>(p) } -> std::same_as<int>;
  { S::template tile<kAnyShape>(p, t, t) } -> std::same_as<CtaTile>;
};

}  // namespace sonicmoe::cuda
