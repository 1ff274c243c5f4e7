// The thread that multiplies, for both CTAs of the pair.
#pragma once

#include "cuda/blackwell/engine/barriers.cuh"
#include "cuda/blackwell/engine/tile_queue.cuh"
#include "cuda/blackwell/params.h"
#include "cuda/blackwell/ptx/tensor_memory.cuh"
#include "cuda/blackwell/ptx/umma.cuh"

namespace sonicmoe::cuda::blackwell {

/// One thread of the even CTA. `tensor` is the address of the accumulators.
template <class Product>
__device__ __forceinline__ void multiply_tiles(const typename Product::Params& p, const Cta& cta,
                                               std::uint32_t tensor) {
  constexpr int kSteps = kDepth / 16;
  const std::uint32_t operands = p.tiles.operands;
  const std::uint32_t step_a = ptx::next_16_of_k((operands & kMnMajorA) != 0);
  const std::uint32_t step_b = ptx::next_16_of_k((operands & kMnMajorB) != 0);
  typename Product::Tiles tiles(p.tiles, cta, QueueReader::kThread);
  StageRing ring;
  AccumulatorRing accumulator;
  for (typename Product::Tile tile; tiles.next(tile);) {
    if (tile.k_tiles == 0) continue;
    const std::uint32_t descriptor =
        ptx::product_descriptor(operands, kCtas * tile.cta_rows, 2 * tile.half_columns);
    const std::uint32_t d = tensor + accumulator.at * kTileColumns;
    if (!cta.d_empty(accumulator.at).wait(accumulator.parity ^ 1)) return;
#pragma unroll 1
    for (int kt = 0; kt < tile.k_tiles; kt++, ring.next()) {
      if (!cta.full(ring.at).wait(ring.parity)) return;
      ptx::fence_after_sync();  // of this wait and, at the first k tile, of the wait for D
      const std::uint64_t a = ptx::matrix_descriptor(cta.a(ring.at));
      const std::uint64_t b = ptx::matrix_descriptor(cta.b(ring.at));
#pragma unroll
      for (int k = 0; k < kSteps; k++) {
        ptx::multiply_pair(d, a + k * step_a, b + k * step_b, descriptor, kt != 0 || k != 0);
      }
      ptx::commit_pair(cta.empty(ring.at));
    }
    ptx::commit_pair(cta.d_full(accumulator.at));
    accumulator.next();
  }
}

}  // namespace sonicmoe::cuda::blackwell
