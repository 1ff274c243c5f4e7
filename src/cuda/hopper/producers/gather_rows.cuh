// Producer of row products: rows gathered by index. All 128 threads copy A by cp.async. Thread 0
// also issues the TMA loads of B and of a ring epilogue's input. cp.async itself zeroes rows past
// the expert and k past the width: an ordinary store of zeros would need a fence of its own, before
// the arrival at `full`.
#pragma once

#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/hopper/producers/await_rows.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace sonicmoe::cuda {

struct GatherRows {
  using Params = GatherRowsParams;
  static constexpr int kCopyArrivals = kWarpgroup;
  static constexpr int kQueueReaders = kWarpgroup / 32;
  static constexpr SchedulerThread kScheduler = SchedulerThread::kConsumer;
  /// The consumers of A, whose epilogue is deferred, need 232 registers; those of dH (the tile
  /// without boxes) need fewer. With 40 registers the copies for dH are 0.5 % slower (H200).
  static constexpr Registers registers(const TileShape& shape) {
    return shape.boxes == 0 ? Registers{56, 224} : Registers{40, 232};
  }
  static constexpr bool kNeedsProxyFence = true;
  static constexpr bool kMayStartEarly = false;

  static __device__ __forceinline__ void prefetch(const Params&) {}

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p,
                                             const Cta<Gemm::kShape>& cta) {
    constexpr TileShape kShape = Gemm::kShape;
    constexpr int kRows = kShape.m / 16;  // rows of a thread: eight threads copy a 128-byte row
    constexpr int kTogether = 4;          // k tiles whose copies differ by a constant
    constexpr int kStep = kDepth * kElementBytes;
    static_assert(kRows * 4 == 32, "a warp copies as many rows as it has lanes");
    constexpr bool kHasInput = RingEpilogue<typename Gemm::Epilogue, kShape>;
    const int lane = threadIdx.x & 31;
    const int first = threadIdx.x >> 3;
    const int chunk = threadIdx.x & 7;
    const std::uint32_t target = first * 128 + ((chunk ^ (first & 7)) << 4);
    const auto* source = static_cast<const std::uint8_t*>(p.producer.source) + chunk * 16;

    TileIterator<typename Gemm::Scheduler, kShape, QueueReader::kWarp> tiles(cta, p.tiles);
    // look_up() computes the next tile, and each lane loads the index of one row; shuffles give it
    // to the lanes that copy this row. This happens while this tile is copied, because the stages
    // in flight do not cover its latency; with a ring epilogue, during the epilogue: this tile's
    // input then fills all stages, so nothing of the next tile could be copied earlier.
    int next_row = kNoRow;
    int next_expert = 0;
    int next_column = 0;  // ~column if the CTA has its own B: no register is free for a flag
    int next_begin = 0;   // ~row if the tile has no rows
    const auto look_up = [&] {
      if (tiles.done()) return;
      const CtaTile next =
          Gemm::Scheduler::template tile<kShape>(p.tiles, tiles.index(), cta.rank());
      const int row = (threadIdx.x >> 5) * 4 + (lane & 3) + (lane >> 2) * 16;
      next_row = source_row(p.producer, next, row);
      next_expert = next.expert;
      next_column = next.own_b ? ~next.column : next.column;
      next_begin = next.valid_rows > 0 ? next.row : ~next.row;
    };
    const auto advance_tile = [&] {
      tiles.next();
      look_up();
    };
    RingPosition<kShape.stages> ring;
    look_up();
    while (!tiles.done()) {
      if (p.producer.arrivals.flags != nullptr) await_rows(p.producer.arrivals, next_row);
      // 64-bit pointers stay in registers for four k tiles. If they were computed or advanced for
      // each k tile, a register would become free only when a copy has read it, and the copies of a
      // stage would wait for each other (5 to 9 % slower on the H200).
      const std::uint8_t* from[kRows];
      std::uint32_t present = 0;
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        const int row = __shfl_sync(~0u, next_row, i * 4 + (lane >> 3));
        if (row != kNoRow) present |= 1u << i;
        from[i] = source + static_cast<std::int64_t>(max(row, 0)) * p.producer.row_bytes;
      }
      CtaTile tile{};  // only the members that the loads of B and of the epilogue's input need
      tile.expert = next_expert;
      tile.own_b = next_column < 0;
      tile.column = tile.own_b ? ~next_column : next_column;
      tile.valid_rows = next_begin < 0 ? 0 : 1;
      tile.row = next_begin;
      const int k_tiles = p.tiles.k_tiles;
      for (int kt = 0; kt < k_tiles; kt += kTogether) {
#pragma unroll
        for (int u = 0; u < kTogether; u++) {
          if (kt + u >= k_tiles) break;
          const ptx::Mbarrier full = cta.full(ring.stage);
          cta.empty(ring.stage).wait(ring.parity ^ 1);
          if ((kt + u) * kDepth + chunk * 8 >= p.producer.width) present = 0;  // the last k tile
          const std::uint32_t a = cta.a(ring.stage) + target;
#pragma unroll
          for (int i = 0; i < kRows; i++) {
            ptx::copy16(a + i * 2048, from[i] + u * kStep, present & 1u << i);
          }
          full.arrive_after_copies();
          if (threadIdx.x == 0) {
            full.arrive_expecting(kShape.b_bytes());
            Gemm::B::load(p.b, tile, kt + u, 0, cta.b(ring.stage), full, cta.rank());
          }
          ring.next();
        }
        if (!kHasInput && kt == 0) advance_tile();
#pragma unroll
        for (int i = 0; i < kRows; i++) ptx::advance<kTogether * kStep>(from[i]);
      }
      load_low_rank<Gemm>(p, cta, ring, tile);
      if constexpr (kHasInput) {
        load_epilogue_input<Gemm>(p, cta, ring, tile);
        advance_tile();
      }
    }
  }

 private:
  static constexpr int kNoRow = -1;

  /// Loads the k tiles of a low-rank term by TMA, after the gathered ones. In each phase `full`
  /// expects an arrival of every copying thread, so all threads arrive.
  template <class Gemm>
  static __device__ __forceinline__ void load_low_rank(const typename Gemm::Params& p,
                                                       const Cta<Gemm::kShape>& cta,
                                                       RingPosition<Gemm::kShape.stages>& ring,
                                                       const CtaTile& tile) {
#pragma unroll 1
    for (int kt = 0; kt < p.tiles.low_rank_k_tiles; kt++, ring.next()) {
      const ptx::Mbarrier full = cta.full(ring.stage);
      cta.empty(ring.stage).wait(ring.parity ^ 1);
      if (threadIdx.x == 0) {
        full.arrive_expecting(Gemm::kShape.a_bytes() + Gemm::kShape.b_bytes());
        ptx::tma_load(cta.a(ring.stage), &p.low_rank.inner.rows, full,
                      {kt * kDepth, 0, max(tile.row, 0)});
        Gemm::B::load(p.low_rank.outer, tile, kt, 0, cta.b(ring.stage), full, cta.rank());
      }
      full.arrive();
    }
  }

  /// Fills the epilogue's input stages, after the tile's k tiles. In each phase `full` expects an
  /// arrival of every copying thread, so all threads arrive.
  template <class Gemm>
  static __device__ __forceinline__ void load_epilogue_input(
      const typename Gemm::Params& p, const Cta<Gemm::kShape>& cta,
      RingPosition<Gemm::kShape.stages>& ring, const CtaTile& tile) {
#pragma unroll 1
    for (int i = 0; i < Gemm::Epilogue::kInputTiles; i++, ring.next()) {
      const ptx::Mbarrier full = cta.full(ring.stage);
      cta.empty(ring.stage).wait(ring.parity ^ 1);
      if (threadIdx.x == 0) {
        Gemm::Epilogue::template load_input<Gemm::kShape>(p.epilogue, tile, i, cta.b(ring.stage),
                                                          full);
      }
      full.arrive();
    }
  }

  /// The source's row for row `row` of a tile.
  static __device__ __forceinline__ int source_row(const Params& p, const CtaTile& tile, int row) {
    if (row >= tile.valid_rows) return kNoRow;
    return p.index != nullptr ? __ldg(p.index + tile.row + row) : tile.row + row;
  }
};

}  // namespace sonicmoe::cuda
