// Producer: rows that already lie in expert order, loaded by TMA. One thread issues everything;
// in dynamic order a second warp draws tile numbers.
#pragma once

#include "cuda/engine/operand_b.cuh"

namespace sonicmoe::cuda {

struct TmaRows {
  struct Params {
    CUtensorMap rows;  ///< (k, part, row), box 64 x 1 x tile rows; part is 0 unless K has two parts
  };
  static constexpr int kCopyArrivals = 0;  // threads that arrive at a full barrier beside the TMA's
  static constexpr int kTileReaders = 1;
  static constexpr Drawer kDrawer = Drawer::kProducer;
  static constexpr Registers registers(const TileShape&) { return {40, 232}; }
  static constexpr bool kNeedsProxyFence = false;

  static __device__ __forceinline__ void prefetch(const Params& p) { ptx::prefetch_map(&p.rows); }

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p,
                                             const Cta<Gemm::kShape>& cta, int count) {
    constexpr TileShape kShape = Gemm::kShape;
    if (threadIdx.x == 32 && kShape.order == Order::kDynamic && cta.rank() == 0) {
      draw_tiles(cta, count, p.tiles.counter);
    }
    if (threadIdx.x != 0) return;
    RingPosition<kShape.stages> ring;
    for (TileStream<kShape, Walker::kThread> stream(cta, count); !stream.done(); stream.next()) {
      const Work work = Gemm::Scheduler::template work<kShape>(p.tiles, stream.tile(), cta.rank());
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, work);
      for (int kt = 0; kt < k_tiles; kt++, ring.next()) {
        const ptx::Mbarrier full = cta.full(ring.stage);
        cta.empty(ring.stage).wait(ring.parity ^ 1);
        full.arrive_expecting(kShape.a_bytes() + kShape.b_bytes());
        const int part = kt >= p.tiles.k_tiles ? 1 : 0;
        ptx::tma_load(cta.a(ring.stage), &p.producer.rows, full,
                      {(kt - part * p.tiles.k_tiles) * kDepth, part, work.row});
        Gemm::B::load(p.b, work, kt, p.tiles.k_tiles, cta.b(ring.stage), full, cta.rank());
      }
    }
  }
};

}  // namespace sonicmoe::cuda
