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
  int row;         ///< the CTA's first row in expert order; depth products: the expert's first row
  int valid_rows;  ///< output rows from the CTA's first row to the end of the expert; depth
                   ///< products: to the end of M. May be more than the tile has. If a tile is split
                   ///< in two halves: at most the rows of this half. 0 or negative: the CTA has no
                   ///< rows, and its consumers only wait for the stages and release them
  int column;      ///< first output column
  int output_row;  ///< depth products: first output row of the CTA
  int depth;       ///< depth products: K, the number of rows of the expert
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
