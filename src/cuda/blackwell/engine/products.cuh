// The thread that multiplies, for both CTAs of the pair.
#pragma once

#include "cuda/blackwell/engine/barriers.cuh"
#include "cuda/blackwell/engine/tile_queue.cuh"
#include "cuda/blackwell/params.h"
#include "cuda/blackwell/ptx/tensor_memory.cuh"
#include "cuda/blackwell/ptx/umma.cuh"

namespace sonicmoe::cuda::blackwell {

/// Multiplies k tiles of 16-bit elements.
class ElementSteps {
 public:
  template <class Params>
  __device__ __forceinline__ ElementSteps(const Params& p, std::uint32_t)
      : operands_(p.tiles.operands),
        step_a_(ptx::next_16_of_k((operands_ & kMnMajorA) != 0)),
        step_b_(ptx::next_16_of_k((operands_ & kMnMajorB) != 0)) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    descriptor_ = ptx::product_descriptor(operands_, kCtas * tile.cta_rows, 2 * tile.half_columns);
  }
  /// D = A B of a stage, or D += A B if `accumulates`.
  __device__ __forceinline__ void run(const Cta& cta, int stage, std::uint32_t d,
                                      bool accumulates) const {
    const std::uint64_t a = ptx::matrix_descriptor(cta.a(stage));
    const std::uint64_t b = ptx::matrix_descriptor(cta.b(stage));
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) {
      ptx::multiply_pair(d, a + k * step_a_, b + k * step_b_, descriptor_, accumulates || k != 0);
    }
  }

 private:
  std::uint32_t operands_, step_a_, step_b_;
  std::uint32_t descriptor_ = 0;
};

/// One thread of the even CTA. `tensor` is the address of tensor memory.
template <class Product>
__device__ __forceinline__ void multiply_tiles(const typename Product::Params& p, const Cta& cta,
                                               std::uint32_t tensor) {
  typename Product::Steps steps(p, tensor);
  typename Product::Tiles tiles(p.tiles, cta, QueueReader::kThread);
  StageRing ring;
  Ring<Product::kAccumulators> accumulator;
  for (typename Product::Tile tile; tiles.next(tile);) {
    if (tile.k_tiles == 0) continue;
    steps.begin(tile);
    const std::uint32_t d = tensor + accumulator.at * kTileColumns;
    if (!cta.d_empty(accumulator.at).wait(accumulator.parity ^ 1)) return;
#pragma unroll 1
    for (int kt = 0; kt < tile.k_tiles; kt++, ring.next()) {
      if (!cta.full(ring.at).wait(ring.parity)) return;
      ptx::fence_after_sync();  // of this wait and, at the first k tile, of the wait for D
      steps.run(cta, ring.at, d, kt != 0);
      ptx::commit_pair(cta.empty(ring.at));
    }
    ptx::commit_pair(cta.d_full(accumulator.at));
    accumulator.next();
  }
}

}  // namespace sonicmoe::cuda::blackwell
