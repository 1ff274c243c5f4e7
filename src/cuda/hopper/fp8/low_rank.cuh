// The k tiles of a low-rank term, which come last in a tile. Their A and B are elements: a stage
// has 64 of a row, in as many bytes as 128 codes.
#pragma once

#include "cuda/hopper/fp8/tile_cards.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

/// Loads k tile `kt` of the term into a stage by TMA. One thread calls it; it arrives at `full`
/// once.
template <class Gemm>
__device__ __forceinline__ void load_low_rank(const typename Gemm::Params& p, const Fp8Cta& cta,
                                              int stage, const CtaTile& tile, int kt) {
  const ptx::Mbarrier full = cta.full(stage);
  full.arrive_expecting(kFp8Tile.a_bytes() + kFp8Tile.b_bytes());
  ptx::tma_load(cta.a(stage), &p.low_rank.inner.rows, full, {kt * kDepth, 0, tile.row});
  Gemm::B::load(p.low_rank.outer, tile, kt, 0, cta.b(stage), full, cta.rank());
}

}  // namespace sonicmoe::cuda
