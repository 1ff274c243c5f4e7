// Stores of rows in expert order that end where an expert ends.
#pragma once

#include "cuda/hopper/engine/staging.cuh"
#include "cuda/hopper/engine/tile.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

/// Stores a box, clipped after the last row of the expert (RaggedMap).
__device__ __forceinline__ void store_ragged(const RaggedMap& to, std::uint32_t box, int column,
                                             int part, const TileOrigin& origin) {
  ptx::tma_store(&to.map, box, ptx::Coord4{column, part, to.reach + origin.row, origin.base});
}

/// The same for the rows of a tile from `offset` on.
__device__ __forceinline__ void store_ragged(const RaggedMap& to, std::uint32_t box, int column,
                                             int part, const CtaTile& tile, int offset) {
  ptx::tma_store(
      &to.map, box,
      ptx::Coord4{column, part, to.reach - tile.valid_rows + offset, tile.row + tile.valid_rows});
}

}  // namespace sonicmoe::cuda
