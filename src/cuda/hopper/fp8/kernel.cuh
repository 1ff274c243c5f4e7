// The FP8 grouped GEMM: producers, schedulers, barriers and staging of the 16-bit engine around
// products that are promoted (mainloop.cuh). Epilogues run at once: deferred under the next tile's
// products they held a stage and lost 3 to 7 % (H200).
#pragma once

#include "cuda/hopper/engine/kernel.cuh"
#include "cuda/hopper/fp8/mainloop.cuh"

namespace sonicmoe::cuda {

/// A kernel. Epilogue::begin() runs before a tile's first products, run() after its last.
template <class Producer_, class Scheduler_, class Epilogue_, BSource kSource>
struct Fp8Gemm {
  using Producer = Producer_;
  using Scheduler = Scheduler_;
  using Epilogue = Epilogue_;
  static constexpr TileShape kShape = kFp8Tile;
  using B = OperandB<kShape, kSource, Major::kK>;
  static constexpr bool kConsumerSchedules = Producer::kScheduler == SchedulerThread::kConsumer;
  using Params = Fp8Params<typename Producer::Params, typename Epilogue::Params>;
};

template <class Gemm>
__device__ __forceinline__ void consume_promoting(const typename Gemm::Params& p,
                                                  const Fp8Cta& cta) {
  using Loop = Fp8Mainloop<Gemm>;
  const int warpgroup = consumer_warpgroup();
  const Rows rows{warpgroup * kFp8Tile.warpgroup_rows(), 1};
  typename Loop::Sums sums;
  typename Loop::Ring ring;
  const Staging<kFp8Tile> staging(cta);
  ConsumerTiles tiles(cta,
                      tile_or_none<typename Gemm::Scheduler, kFp8Tile>(p.tiles, cta.cluster()));
  InlineScheduler<typename Gemm::Scheduler, kFp8Tile> scheduler(cta, p.tiles);
  if (Gemm::kConsumerSchedules && tiles.index() != kNoTile) scheduler.begin();
  const auto look_up = [&] {
    const int index = tiles.index();
    if (index == kNoTile) return;
    const CtaTile next = tile_of<Gemm>(p, cta, index);
    tiles.save_next(next);
    TileWeightScales(tiles).load(p.weight_scales, next, p.tiles.k_tiles, 0);
  };
  look_up();
  while (tiles.index() != kNoTile) {
    tiles.advance();
    const bool valid = ptx::uniform(tiles.current().valid_rows) > rows.offset;
    ring.make_uniform();
    // Also without rows: else these loads might land after those of the next tile, in their place.
    // Before begin(), whose loads are not waited for until the epilogue.
    TileWeightScales(tiles).wait();
    if (Gemm::kConsumerSchedules) scheduler.take();
    if (valid) {
      Gemm::Epilogue::begin(p.epilogue, tiles, cta, staging, rows);
      Loop::run(sums, p, cta, ring, tiles, warpgroup);
    } else {
      Loop::pass(p, cta, ring);
    }
    // The next tile's scales arrive under the epilogue.
    if (Gemm::kConsumerSchedules) scheduler.send(tiles.entries_read() + 1);
    tiles.template next_index<typename Gemm::Scheduler>(cta, p.tiles);
    look_up();
    tiles.save(ring);
    if (valid) Gemm::Epilogue::run(p.epilogue, sums, tiles, cta, staging, rows);
    tiles.restore(ring);
  }
  staging.drain();
  wait_for_unread_index<Gemm>(cta, tiles);
}

template <class Gemm>
__global__ void __maxnreg__(kLaunchRegisters)
    fp8_gemm_kernel(const __grid_constant__ typename Gemm::Params p) {
  extern __shared__ __align__(1024) std::uint8_t shared[];
  Fp8Cta cta;
  cta.base = ptx::shared_address(shared);
  if (threadIdx.x == 0) {
    Gemm::Epilogue::init(cta);
    init_barriers<Gemm>(cta);
    Gemm::Producer::prefetch(p.producer);
    ptx::prefetch_map(&p.b.map[0]);
  }
  ptx::cluster_sync();
  launch_dependents_after_wait();
  constexpr Registers kRegisters = Gemm::Producer::registers();
  static_assert(kRegisters.producer + kConsumers * kRegisters.consumer <= 3 * kLaunchRegisters);
  if (threadIdx.x < kWarpgroup) {
    ptx::shrink_registers<kRegisters.producer>();
    Gemm::Producer::template run<Gemm>(p, cta);
    __syncwarp();
  } else {
    ptx::grow_registers<kRegisters.consumer>();
    consume_promoting<Gemm>(p, cta);
  }
  // The neighbour may still multicast into this CTA's stages and arrive at its mbarriers.
  ptx::cluster_sync();
}

}  // namespace sonicmoe::cuda
