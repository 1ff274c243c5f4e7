// Stores of grouped rows that end where an expert ends.
#pragma once

#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/hopper/ptx/tma.cuh"

namespace sonicmoe::cuda {

/// A store map that ends where an expert ends: dimensions (column, part, row, base) where row and
/// base have the same stride and the map's address lies `reach` rows before the tensor. A store at
/// row = reach - left, base = first row + left covers the rows from `first row` on, and the
/// hardware clips it at `left` rows, without a map per expert.
struct RaggedMap {
  CUtensorMap map;
  std::int32_t reach;
};

__device__ __forceinline__ void store_ragged(const RaggedMap& to, std::uint32_t box, int column,
                                             int part, const Place& place) {
  ptx::tma_store(&to.map, box, ptx::Coord4{column, part, to.reach + place.below, place.end});
}

__device__ __forceinline__ void store_ragged(const RaggedMap& to, std::uint32_t box, int column,
                                             int part, const Work& work, int offset) {
  ptx::tma_store(&to.map, box,
                 ptx::Coord4{column, part, to.reach - work.left + offset, work.row + work.left});
}

}  // namespace sonicmoe::cuda
