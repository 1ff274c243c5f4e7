// Tiles that are copied or multiplied, in shared memory: the loader writes a tile's slot when it
// begins the tile, and the epilogue reads it.
#pragma once

#include <cstdint>

#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {

/// The CTA's dynamic shared memory: barriers, tile slots, staging buffers, stages.
__device__ __forceinline__ std::uint8_t* shared_memory() {
  extern __shared__ __align__(128) std::uint8_t shared[];
  return shared;
}

/// A function, because a pointer would hold registers.
__device__ __forceinline__ TileSlot* tile_slots() {
  return reinterpret_cast<TileSlot*>(shared_memory() + kBarrierBytes);
}

}  // namespace sonicmoe::cuda::portable
