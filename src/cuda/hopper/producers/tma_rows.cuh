// Producer: rows that already lie in expert order, loaded by TMA. One thread issues everything;
// in drawn order a second warp draws tile numbers.
#pragma once

#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/hopper/ptx/tma.cuh"
#include "cuda/ptx/global.cuh"

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
                                             const Cta<Gemm::kShape>& cta) {
    constexpr TileShape kShape = Gemm::kShape;
    if (threadIdx.x == 32 && p.tiles.counter != nullptr && cta.rank() == 0) {
      draw_tiles<typename Gemm::Scheduler>(cta, p.tiles);
    }
    if (threadIdx.x != 0) return;
    RingPosition<kShape.stages> ring;
    TileStream<typename Gemm::Scheduler, kShape, Walker::kThread> stream(cta, p.tiles);
    const auto look_up = [&] {
      return Gemm::Scheduler::template work<kShape>(p.tiles, stream.tile(), cta.rank());
    };
    Work next{};
    if (!stream.done()) next = look_up();
    bool waits = p.begins == Begins::kEarly;
    if (waits && ptx::acquire_word(p.told) != static_cast<unsigned>(p.tellers)) {
      let_next_begin();
      waits = false;
    }
    if (waits) ptx::fence_async();
    while (!stream.done()) {
      if (waits && stream.tile() >= p.early_tiles) {
        let_next_begin();
        waits = false;
      }
      const Work work = next;
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, work);
      for (int kt = 0; kt < k_tiles; kt++, ring.next()) {
        const ptx::Mbarrier full = cta.full(ring.stage);
        cta.empty(ring.stage).wait(ring.parity ^ 1);
        full.arrive_expecting(kShape.a_bytes() + kShape.b_bytes());
        const int part = kt >= p.tiles.k_tiles ? 1 : 0;
        ptx::tma_load(cta.a(ring.stage), &p.producer.rows, full,
                      {(kt - part * p.tiles.k_tiles) * kDepth, part, work.row});
        Gemm::B::load(p.b, work, kt, p.tiles.k_tiles, cta.b(ring.stage), full, cta.rank());
        if (kt == k_tiles / 2) {  // the stages in flight do not cover it
          stream.next();
          if (!stream.done()) next = look_up();
        }
      }
    }
    if (waits) let_next_begin();
  }
};

}  // namespace sonicmoe::cuda
