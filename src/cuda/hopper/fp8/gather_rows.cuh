// Producer: gathers rows of codes by index, with their scales. All 128 threads copy by cp.async:
// eight threads copy the 128 bytes of a row, and each thread copies the scale of one row. Thread 0
// also loads B by TMA.
#pragma once

#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/hopper/fp8/scales.cuh"
#include "cuda/hopper/ptx/mbarrier.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/copy.cuh"

namespace sonicmoe::cuda {

struct Fp8GatherRows {
  using Params = Fp8GatherParams;
  static constexpr int kCopyArrivals = kWarpgroup;
  static constexpr int kQueueReaders = kWarpgroup / 32;
  static constexpr SchedulerThread kScheduler = SchedulerThread::kConsumer;
  static constexpr Registers registers() { return {40, 232}; }
  static constexpr bool kNeedsProxyFence = true;

  static __device__ __forceinline__ void prefetch(const Params&) {}
  static __device__ __forceinline__ int rows_before(const CtaTile&) { return 0; }

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p, const Fp8Cta& cta) {
    constexpr TileShape kShape = Gemm::kShape;
    constexpr int kRows = kShape.m / 16;  // of this thread
    constexpr int kTogether = 4;          // k tiles that are copied from one set of addresses
    const int lane = threadIdx.x & 31;
    const int first = threadIdx.x >> 3;
    const int chunk = threadIdx.x & 7;
    const std::uint32_t target = first * 128 + ((chunk ^ (first & 7)) << 4);
    // The row of the tile whose index this lane looks up, and whose scales it copies.
    const int own = (threadIdx.x >> 5) * 4 + (lane & 3) + (lane >> 2) * 16;
    TileIterator<typename Gemm::Scheduler, kShape, QueueReader::kWarp> tiles(cta, p.tiles);
    // The next tile and its row indices are looked up while the current tile is copied, because the
    // stages in flight do not cover the latency of the look-up. Each lane looks up one row index
    // and shares it with its warp.
    int next_row = kNoRow;
    int next_expert = 0;
    // The column, or its complement if the CTA has its own B: one register for the column and for
    // own_b.
    int next_column = 0;
    const auto look_up = [&] {
      if (tiles.done()) return;
      const CtaTile next =
          Gemm::Scheduler::template tile<kShape>(p.tiles, tiles.index(), cta.rank());
      next_row = own < next.valid_rows ? __ldg(p.producer.index + next.row + own) : kNoRow;
      next_expert = next.expert;
      next_column = next.own_b ? ~next.column : next.column;
    };
    RingPosition<kShape.stages> ring;
    look_up();
    while (!tiles.done()) {
      // The addresses of all rows stay in registers, and are advanced every kTogether k tiles. So
      // the copies of a stage do not wait for each other.
      const std::uint8_t* source = ptx::opaque(p.producer.codes) + chunk * 16;
      const std::uint8_t* from[kRows];
      std::uint32_t present = next_row != kNoRow ? 1u << kRows : 0;
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        const int row = __shfl_sync(~0u, next_row, i * 4 + (lane >> 3));
        if (row != kNoRow) present |= 1u << i;
        from[i] = source + static_cast<std::int64_t>(max(row, 0)) * p.producer.row_bytes;
      }
      const std::uint32_t scale = static_cast<std::uint32_t>(max(next_row, 0)) * p.producer.blocks;
      CtaTile tile{};  // only the fields that B::load() reads
      tile.expert = next_expert;
      tile.own_b = next_column < 0;
      tile.column = tile.own_b ? ~next_column : next_column;
      for (int kt = 0; kt == 0 || kt < p.tiles.k_tiles; kt += kTogether) {
#pragma unroll
        for (int u = 0; u < kTogether; u++) {
          if (u > 0 && kt + u >= p.tiles.k_tiles) break;
          const ptx::Mbarrier full = cta.full(ring.stage);
          cta.empty(ring.stage).wait(ring.parity ^ 1);
          const std::uint32_t a = cta.a(ring.stage) + target;
#pragma unroll
          for (int i = 0; i < kRows; i++) {
            ptx::copy16(a + i * 2048, from[i] + u * 128, present & 1u << i);
          }
          if ((present & 1u << kRows) != 0) {
            ptx::copy4(row_scales(cta, ring.stage) + own * 4, p.producer.scales + scale + kt + u);
          }
          full.arrive_after_copies();
          if (threadIdx.x == 0) {
            full.arrive_expecting(kShape.b_bytes());
            Gemm::B::load(p.b, tile, kt + u, p.tiles.k_tiles, cta.b(ring.stage), full, cta.rank());
          }
          ring.next();
        }
        if (kt == 0) {
          tiles.next();
          look_up();
        }
#pragma unroll
        for (int i = 0; i < kRows; i++) ptx::advance<kTogether * 128>(from[i]);
      }
    }
  }

 private:
  static constexpr int kNoRow = -1;
};

}  // namespace sonicmoe::cuda
