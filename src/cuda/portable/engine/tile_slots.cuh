// Descriptions of tiles in shared memory. The loader writes a tile's slot when it begins to copy
// the tile; the main loop and the epilogue read it.
#pragma once

#include <cstdint>

#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {

/// The CTA's dynamic shared memory: barriers, tile slots, staging buffers, stages.
__device__ __forceinline__ std::uint8_t* shared_memory() {
  extern __shared__ __align__(128) std::uint8_t shared[];
  return shared;
}

/// A function and not a stored pointer, because the pointer would take registers.
__device__ __forceinline__ TileSlot* tile_slots() {
  return reinterpret_cast<TileSlot*>(shared_memory() + kBarrierBytes);
}

}  // namespace sonicmoe::cuda::portable
