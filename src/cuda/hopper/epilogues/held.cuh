// What a cooperative tile leaves to be stored while the next one is multiplied: its results in the
// element type, which take half the registers of the accumulator and leave that to the products.
#pragma once

#include "cuda/hopper/epilogues/element.cuh"

namespace sonicmoe::cuda {

/// One warpgroup's 64 rows of a tile of 256 columns. Where the tile lies, only the elected thread
/// asks: it keeps that in shared memory.
struct HeldTile {
  Fragment block[4];  ///< 64 columns each

  template <TileShape kShape>
  static __device__ __forceinline__ void open(const Work& work, const Staging<kShape>& staging,
                                              Rows rows) {
    static_assert(kShape.n == 256 && kShape.halves() == 1 && kShape.boxes == 2);
    if (staging.elected()) {
      staging.note({work.column, rows.offset - work.left, work.row + work.left});
    }
  }

  /// Written boxes go where issue(place) stores them.
  template <TileShape kShape, class Issue>
  static __device__ __forceinline__ void send(const Staging<kShape>& staging, Issue issue) {
    staging.publish();
    if (staging.elected()) {
      issue(staging.noted());
      staging.commit();
    }
  }
};

}  // namespace sonicmoe::cuda
