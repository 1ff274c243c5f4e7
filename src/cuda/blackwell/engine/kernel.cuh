// The kernel of a row product. docs/blackwell.md explains it.
#pragma once

#include "cuda/blackwell/engine/barriers.cuh"
#include "cuda/blackwell/engine/loads.cuh"
#include "cuda/blackwell/engine/products.cuh"
#include "cuda/blackwell/engine/tiles.cuh"
#include "cuda/blackwell/epilogues/warp_tile.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/sm90.cuh"

namespace sonicmoe::cuda::blackwell {

/// An epilogue warp: runs the epilogue of its part of each tile.
template <class Epilogue>
__device__ __forceinline__ void finish_tiles(const typename Epilogue::Params& epilogue,
                                             const RowTilesParams& p, const Cta& cta,
                                             std::uint32_t tensor, int warp) {
  TileWalk walk(p);
  AccumulatorRing accumulator;
  for (Tile tile; walk.next(tile); accumulator.next()) {
    const WarpTile part(tile, cta, warp, tensor + accumulator.at * kTileColumns);
    cta.d_full(accumulator.at).wait(accumulator.parity);
    ptx::fence_after_sync();
    if (part.rows > 0) Epilogue::run(epilogue, part);
    ptx::fence_before_sync();
    __syncwarp();
    if (part.lane == 0) cta.d_empty(accumulator.at).arrive_at(0);
  }
}

template <class Epilogue>
__global__ void __launch_bounds__(kThreads, 1)
    row_product(const __grid_constant__ RowProductParams<typename Epilogue::Params> p) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const Cta cta{ptx::shared_address(shared), ptx::cluster_rank()};
  const int warp = ptx::uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) cta.init_barriers();
  if (warp == kProductWarp) ptx::allocate_tensor_memory(cta.tensor_slot(), kTensorColumns);
  ptx::cluster_sync();
  const auto tensor = static_cast<std::uint32_t>(ptx::load_word(cta.tensor_slot()));
  if (warp < kEpilogueWarps) {
    finish_tiles<Epilogue>(p.epilogue, p.tiles, cta, tensor, warp);
  } else if (warp == kProductWarp) {
    if (cta.rank == 0 && ptx::elect()) multiply_tiles(p.segments, p.tiles, cta, tensor);
  } else if (warp == kColumnWarp) {
    if (ptx::elect()) load_columns(p.segments, p.tiles, cta);
  } else {
    load_rows(p.segments, p.tiles, cta, warp - kFirstRowWarp, lane);
  }
  __syncwarp();
  ptx::cluster_sync();
  if (warp == kProductWarp) ptx::free_tensor_memory(tensor, kTensorColumns);
}

}  // namespace sonicmoe::cuda::blackwell
