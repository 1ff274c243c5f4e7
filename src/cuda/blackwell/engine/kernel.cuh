// The kernels of row products and of depth products. docs/blackwell.md explains them.
#pragma once

#include "cuda/blackwell/engine/barriers.cuh"
#include "cuda/blackwell/engine/depth_loads.cuh"
#include "cuda/blackwell/engine/launch_order.cuh"
#include "cuda/blackwell/engine/products.cuh"
#include "cuda/blackwell/engine/row_loads.cuh"
#include "cuda/blackwell/engine/tiles.cuh"
#include "cuda/blackwell/epilogues/warp_tile.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/sm90.cuh"

namespace sonicmoe::cuda::blackwell {

/// What all products of 16-bit elements have in common.
struct ElementProduct {
  using Steps = ElementSteps;
  static constexpr int kThreads = blackwell::kThreads;
  static constexpr int kAccumulators = blackwell::kAccumulators;
  static constexpr int kLoaders = 1;  ///< arrivals at `full`
  static constexpr int kReaders = kQueueReaders;
  template <class Params>
  static __device__ __forceinline__ void load_by_scale_warp(const Params&, const Cta&, int) {}
};

/// What row products and depth products do differently.
template <class Epilogue_>
struct RowProductOf : ElementProduct {
  using Epilogue = Epilogue_;
  using Params = RowProductParams<typename Epilogue::Params>;
  using Tiles = RowTiles;
  using Tile = blackwell::Tile;

  static __device__ __forceinline__ void load_by_column_warp(const Params& p, const Cta& cta, int) {
    if (ptx::elect()) load_columns(p.segments, p.tiles, cta);
  }
  static __device__ __forceinline__ void load_by_row_warp(const Params& p, const Cta& cta, int warp,
                                                          int lane) {
    load_rows(p.segments, p.tiles, cta, warp, lane);
  }
};
template <class Epilogue_>
struct DepthProductOf : ElementProduct {
  using Epilogue = Epilogue_;
  using Params = DepthProductParams<typename Epilogue::Params>;
  using Tiles = DepthTiles;
  using Tile = DepthTile;

  static __device__ __forceinline__ void load_by_column_warp(const Params& p, const Cta& cta,
                                                             int lane) {
    load_ordered(p.operands, p.tiles, cta, lane);
  }
  static __device__ __forceinline__ void load_by_row_warp(const Params& p, const Cta& cta, int warp,
                                                          int lane) {
    load_gathered(p.operands, p.tiles, cta, warp, lane);
  }
};

/// An epilogue warp: runs the epilogue of its part of each tile.
template <class Product>
__device__ __forceinline__ void finish_tiles(const typename Product::Params& p, const Cta& cta,
                                             std::uint32_t tensor, int warp) {
  typename Product::Tiles tiles(p.tiles, cta, QueueReader::kWarp);
  Ring<Product::kAccumulators> accumulator;
  bool must_wait = begins_at_once<typename Product::Epilogue>(p.order) && threadIdx.x == 0;
  for (typename Product::Tile tile; tiles.next(tile);) {
    const WarpTile part(tile, cta, warp, tensor + accumulator.at * kTileColumns);
    bool in_time = true;
    if (!part.is_zero) {
      in_time = __all_sync(~0u, cta.d_full(accumulator.at).wait(accumulator.parity)) != 0;
      ptx::fence_after_sync();
    }
    if (in_time && part.rows > 0) Product::Epilogue::run(p.epilogue, part);
    if (must_wait) launch_dependents_after_wait();  // after the first tile the wait is short
    must_wait = false;
    if (part.is_zero) continue;
    ptx::fence_before_sync();
    __syncwarp();
    if (part.lane == 0) cta.d_empty(accumulator.at).arrive_at(0);
    accumulator.next();
  }
  // There was no tile. When this kernel is complete, all kernels before it must be complete too.
  if (Product::Tiles::kMayBeNone && must_wait) ptx::wait_for_previous_kernel();
}

template <class Product>
__global__ void __launch_bounds__(Product::kThreads, 1)
    pair_product(const __grid_constant__ typename Product::Params p) {
  using Epilogue = typename Product::Epilogue;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const Cta cta{ptx::shared_address(shared), ptx::cluster_rank(), p.tiles.limit};
  const int warp = ptx::uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (threadIdx.x == 0) cta.init_barriers(Product::kLoaders, Product::kReaders);
  if (warp == kProductWarp) ptx::allocate_tensor_memory(cta.tensor_slot(), kTensorColumns);
  ptx::cluster_sync();
  const auto tensor = static_cast<std::uint32_t>(ptx::load_word(cta.tensor_slot()));
  if (!begins_at_once<Epilogue>(p.order)) launch_dependents_after_wait();
  if (warp < kEpilogueWarps) {
    finish_tiles<Product>(p, cta, tensor, warp);
  } else if (warp == kProductWarp) {
    if (ptx::elect()) {
      if (cta.rank != kSchedulerCta) {
        multiply_tiles<Product>(p, cta, tensor);
      } else if (p.tiles.tile_counter != nullptr) {
        schedule_tiles(cta, p.tiles.tile_counter, Product::Tiles::count(p.tiles));
      }
    }
  } else if (warp == kColumnWarp) {
    begin_loads<Epilogue>(p.order);
    Product::load_by_column_warp(p, cta, lane);
  } else if (warp < kScaleWarp) {
    begin_loads<Epilogue>(p.order);
    Product::load_by_row_warp(p, cta, warp - kFirstRowWarp, lane);
  } else {
    begin_loads<Epilogue>(p.order);
    Product::load_by_scale_warp(p, cta, lane);
  }
  __syncwarp();
  ptx::cluster_sync();
  if (warp == kProductWarp) ptx::free_tensor_memory(tensor, kTensorColumns);
}

}  // namespace sonicmoe::cuda::blackwell
