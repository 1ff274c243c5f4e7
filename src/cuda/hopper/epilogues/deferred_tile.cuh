// The state of a deferred epilogue: a tile's results in the element type. They take half as many
// registers as the accumulator, which is then free for the next tile's products.
#pragma once

#include "cuda/hopper/engine/staging.cuh"
#include "cuda/hopper/engine/tile.cuh"

namespace sonicmoe::cuda {

/// One warpgroup's 64 rows of a tile of kBlocks * 64 columns. The tile's origin is in shared
/// memory, because only the elected thread reads it.
template <int kBlocks>
struct DeferredTile {
  Fragment block[kBlocks];  ///< 64 columns each

  template <TileShape kShape>
  static __device__ __forceinline__ void save_origin(const CtaTile& tile,
                                                     const Staging<kShape>& staging, Rows rows) {
    static_assert(kShape.n == kBlocks * 64 && kShape.row_blocks() == 1 && kShape.boxes == 2);
    if (staging.elected()) {
      staging.save_origin({tile.column, rows.offset - tile.valid_rows, tile.row + tile.valid_rows});
    }
  }

  /// Publishes the written boxes; the elected thread stores them by issue(origin).
  template <TileShape kShape, class Issue>
  static __device__ __forceinline__ void store(const Staging<kShape>& staging, Issue issue) {
    staging.publish();
    if (staging.elected()) {
      issue(staging.saved_origin());
      staging.commit();
    }
  }
};

}  // namespace sonicmoe::cuda
