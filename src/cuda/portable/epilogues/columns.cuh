// The columns of a warp's results in the tile, and access to 16 of its rows.
#pragma once

#include "cuda/portable/engine/fragments.cuh"

namespace sonicmoe::cuda::portable {

inline constexpr int kChunks = kWarpColumns / 8;
/// Columns of a half of the tile (Columns::kHalves). Only wide tiles are divided into halves.
inline constexpr int kHalfColumns = static_cast<int>(Width::k256) / 2;

/// The tile's column at which chunk `chunk` of a warp's 8 chunks of 8 columns begins.
template <Columns kColumns>
__device__ __forceinline__ int chunk_column(const Warp& warp, int chunk) {
  if constexpr (kColumns == Columns::kNeighbours) return warp.column * kWarpColumns + chunk * 8;
  return chunk / 4 * kHalfColumns + warp.column * 32 + chunk % 4 * 8;
}

/// Calls write(acc[part]). The caller's loop over the four parts is not unrolled, because four
/// copies of an epilogue would not fit the instruction cache. Registers cannot be indexed at run
/// time, so a branch selects the part.
template <class Write>
__device__ __forceinline__ void with_part(const Accumulators& acc, int part, const Write& write) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (i == part) write(acc[i]);
  }
}

}  // namespace sonicmoe::cuda::portable
