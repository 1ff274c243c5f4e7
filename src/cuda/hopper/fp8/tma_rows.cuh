// Producer for rows in expert order. Thread 0 issues all loads: rows of codes, their scales and B
// by TMA, the weight scales by cp.async. It also writes the cards (tile_cards.cuh). In dynamic
// order thread 32 of the cluster's first CTA runs the tile scheduler.
#pragma once

#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/hopper/fp8/low_rank.cuh"
#include "cuda/hopper/fp8/scales.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

struct Fp8TmaRows {
  using Params = Fp8TmaParams;
  static constexpr int kCopyArrivals = 1;
  static constexpr int kQueueReaders = 1;
  static constexpr SchedulerThread kScheduler = SchedulerThread::kProducer;
  static constexpr Registers registers() { return {40, 232}; }
  static constexpr bool kGathers = false;

  static __device__ __forceinline__ void prefetch(const Params& p) {
    ptx::prefetch_map(&p.rows);
    ptx::prefetch_map(&p.scales);
  }
  /// The number of earlier rows whose scales come before the scales of the tile's rows in a stage,
  /// because a box of row scales begins at a multiple of four rows.
  static __device__ __forceinline__ int rows_before(const CtaTile& tile) { return tile.row & 3; }

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p, const Fp8Cta& cta) {
    constexpr TileShape kShape = Gemm::kShape;
    if (threadIdx.x == 32 && p.tiles.tile_counter != nullptr && cta.rank() == 0) {
      run_scheduler<typename Gemm::Scheduler>(cta, p.tiles);
    }
    if (threadIdx.x != 0) return;
    RingPosition<kShape.stages> ring;
    TileIterator<typename Gemm::Scheduler, kShape, QueueReader::kThread> tiles(cta, p.tiles);
    CardWriter cards(cta);
    CtaTile next{};
    const auto look_up = [&] {
      if (tiles.done()) {
        cards.write_end();
        return;
      }
      next = Gemm::Scheduler::template tile<kShape>(p.tiles, tiles.index(), cta.rank());
      cards.write(next);
    };
    look_up();
    while (!tiles.done()) {
      const CtaTile tile = next;
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, tile);
      for (int kt = 0; kt < k_tiles; kt++, ring.next()) {
        cta.empty(ring.stage).wait(ring.parity ^ 1);
        if (kt < p.tiles.k_tiles) {
          load_codes<Gemm>(p, cta, ring.stage, tile, kt);
        } else {
          load_low_rank<Gemm>(p, cta, ring.stage, tile, kt - p.tiles.k_tiles);
        }
        cta.full(ring.stage).arrive_after_copies();
        // The next tile is computed in the middle of this tile, because the stages in flight do
        // not cover the latency of the loads that this needs.
        if (kt == k_tiles / 2) {
          tiles.next();
          look_up();
        }
      }
    }
  }

 private:
  /// Loads codes and scales. It arrives at `full` once, before the copies of weight scales have
  /// landed.
  template <class Gemm>
  static __device__ __forceinline__ void load_codes(const typename Gemm::Params& p,
                                                    const Fp8Cta& cta, int stage,
                                                    const CtaTile& tile, int kt) {
    const ptx::Mbarrier full = cta.full(stage);
    full.arrive_expecting(Gemm::kShape.a_bytes() + Gemm::kShape.b_bytes() + kFp8ScaleRows * 4);
    ptx::tma_load(cta.a(stage), &p.producer.rows, full, {kt * kDepth, 0, tile.row});
    ptx::tma_load(row_scales(cta, stage), &p.producer.scales, full, {tile.row & ~3, 0, kt});
    Gemm::B::load(p.b, tile, kt, 0, cta.b(stage), full, cta.rank());
#pragma unroll
    for (int unit = 0; unit < kFp8Units; unit++) {
      copy_weight_scale(p.weight_scales, tile, unit, kt, cta, stage);
    }
  }
};

}  // namespace sonicmoe::cuda
