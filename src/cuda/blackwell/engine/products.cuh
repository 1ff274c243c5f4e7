// The thread that multiplies, for both CTAs of the pair.
#pragma once

#include "cuda/blackwell/engine/barriers.cuh"
#include "cuda/blackwell/engine/tiles.cuh"
#include "cuda/blackwell/ptx/tensor_memory.cuh"
#include "cuda/blackwell/ptx/umma.cuh"

namespace sonicmoe::cuda::blackwell {

/// One thread of the even CTA. `tensor` is the address of the accumulators.
__device__ __forceinline__ void multiply_tiles(const Segment* segments, const RowTilesParams& p,
                                               const Cta& cta, std::uint32_t tensor) {
  constexpr int kSteps = kDepth / 16;
  const std::uint32_t step_b = (p.mn_major != 0 ? 2048 : 32) / 16;
  int k_tiles = 0;
  for (int s = 0; s < p.segments; s++) k_tiles += segments[s].k_tiles;
  TileWalk walk(p);
  StageRing ring;
  AccumulatorRing accumulator;
  for (Tile tile; walk.next(tile); accumulator.next()) {
    const std::uint32_t descriptor =
        ptx::product_descriptor(static_cast<std::uint32_t>(p.types), kCtas * tile.cta_rows,
                                2 * tile.half_columns, p.mn_major != 0);
    const std::uint32_t d = tensor + accumulator.at * kTileColumns;
    cta.d_empty(accumulator.at).wait(accumulator.parity ^ 1);
#pragma unroll 1
    for (int kt = 0; kt < k_tiles; kt++, ring.next()) {
      cta.full(ring.at).wait(ring.parity);
      ptx::fence_after_sync();  // of this wait and, at the first k tile, of the wait for D
      const std::uint64_t a = ptx::matrix_descriptor(cta.a(ring.at));
      const std::uint64_t b = ptx::matrix_descriptor(cta.b(ring.at));
#pragma unroll
      for (int k = 0; k < kSteps; k++) {
        ptx::multiply_pair(d, a + k * 2, b + k * step_b, descriptor, kt != 0 || k != 0);
      }
      ptx::commit_pair(cta.empty(ring.at));
    }
    ptx::commit_pair(cta.d_full(accumulator.at));
  }
}

}  // namespace sonicmoe::cuda::blackwell
