// Producer of row products whose rows are in expert order: TMA loads them. Thread 0 issues the
// loads of both operands. In dynamic order thread 32 of the cluster's first CTA is the scheduler.
#pragma once

#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/hopper/engine/launch_order.cuh"
#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

struct TmaRows {
  using Params = TmaRowsParams;
  static constexpr int kCopyArrivals = 0;
  static constexpr int kQueueReaders = 1;
  static constexpr SchedulerThread kScheduler = SchedulerThread::kProducer;
  static constexpr Registers registers(const TileShape&) { return {40, 232}; }
  static constexpr bool kNeedsProxyFence = false;
  static constexpr bool kMayStartEarly = true;

  static __device__ __forceinline__ void prefetch(const Params& p) { ptx::prefetch_map(&p.rows); }

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p,
                                             const Cta<Gemm::kShape>& cta) {
    constexpr TileShape kShape = Gemm::kShape;
    if (threadIdx.x == 32 && p.tiles.tile_counter != nullptr && cta.rank() == 0) {
      run_scheduler<typename Gemm::Scheduler>(cta, p.tiles);
    }
    if (threadIdx.x != 0) return;
    RingPosition<kShape.stages> ring;
    TileIterator<typename Gemm::Scheduler, kShape, QueueReader::kThread> tiles(cta, p.tiles);
    const auto look_up = [&] {
      return Gemm::Scheduler::template tile<kShape>(p.tiles, tiles.index(), cta.rank());
    };
    CtaTile next{};
    if (!tiles.done()) next = look_up();
    bool early = p.begins == Begins::kEarly;  // the previous kernel may still be running
    if (early &&
        ptx::acquire_word(p.release_count) != static_cast<unsigned>(p.early_release_ctas)) {
      launch_dependents_after_wait();
      early = false;
    }
    if (p.begins != Begins::kAfterPrevious) ptx::fence_async();
    while (!tiles.done()) {
      if (early && tiles.index() >= p.early_start_tiles) {
        launch_dependents_after_wait();
        early = false;
      }
      const CtaTile tile = next;
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, tile);
      for (int kt = 0; kt < k_tiles; kt++, ring.next()) {
        const ptx::Mbarrier full = cta.full(ring.stage);
        cta.empty(ring.stage).wait(ring.parity ^ 1);
        full.arrive_expecting(kShape.a_bytes() + kShape.b_bytes());
        const int low = kt - (k_tiles - p.tiles.low_rank_k_tiles);  // k tile of the low-rank term
        const int at = low >= 0 ? low : kt;
        const int part = low < 0 && kt >= p.tiles.k_tiles ? 1 : 0;
        const int k = at - part * p.tiles.k_tiles;
        ptx::tma_load(cta.a(ring.stage), low >= 0 ? &p.low_rank.inner.rows : &p.producer.rows, full,
                      {k * kDepth, part, tile.row});
        Gemm::B::load(low >= 0 ? p.low_rank.outer : p.b, tile, k, part, cta.b(ring.stage), full,
                      cta.rank());
        // The next tile is computed half a tile ahead, because the stages in flight do not cover
        // the latency of the loads that this needs.
        if (kt == k_tiles / 2) {
          tiles.next();
          if (!tiles.done()) next = look_up();
        }
      }
    }
    if (early) launch_dependents_after_wait();
  }
};

}  // namespace sonicmoe::cuda
