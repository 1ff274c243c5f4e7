// Producer for gathered rows: copies rows of codes by index, and their scales, by cp.async.
//
//   | threads | work in each k tile                                                             |
//   | all 128 | copy codes: 16 bytes of each of eight rows a thread; eight threads copy one row |
//   | all 128 | copy one row scale a thread                                                     |
//   | 0 and 1 | copy the weight scales of the two units                                         |
//   | 0       | loads B by TMA; once a tile it writes the card of the next tile                 |
#pragma once

#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/hopper/fp8/low_rank.cuh"
#include "cuda/hopper/fp8/scales.cuh"
#include "cuda/hopper/ptx/thread.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace sonicmoe::cuda {

struct Fp8GatherRows {
  using Params = Fp8GatherParams;
  static constexpr int kCopyArrivals = kWarpgroup;
  static constexpr int kQueueReaders = kWarpgroup / 32;
  static constexpr SchedulerThread kScheduler = SchedulerThread::kConsumer;
  static constexpr Registers registers() { return {40, 232}; }
  static constexpr bool kGathers = true;

  static __device__ __forceinline__ void prefetch(const Params&) {}
  static __device__ __forceinline__ int rows_before(const CtaTile&) { return 0; }

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p, const Fp8Cta& cta) {
    constexpr TileShape kShape = Gemm::kShape;
    constexpr int kRows = kShape.m / 16;  // of this thread
    const int first = threadIdx.x >> 3;
    const std::uint32_t target = first * 128 + (((threadIdx.x ^ first) & 7) << 4);
    TileIterator<typename Gemm::Scheduler, kShape, QueueReader::kWarp> tiles(cta, p.tiles);
    // look_up() computes the next tile, and each lane loads the index of one row; __shfl_sync gives
    // it to the lanes that copy this row. It runs in the middle of the current tile, because the
    // stages in flight do not cover its latency.
    int next_row = kNoRow;
    int next_expert = 0;
    int next_begin = 0;
    // The tile's column if own_b is false, ~column if it is true: both in one register.
    int next_column = 0;
    CardWriter cards(cta);  // only thread 0 uses it
    const auto look_up = [&] {
      if (tiles.done()) {
        if (threadIdx.x == 0) cards.write_end();
        return;
      }
      const CtaTile next =
          Gemm::Scheduler::template tile<kShape>(p.tiles, tiles.index(), cta.rank());
      const int own = own_row();
      next_row = own < next.valid_rows ? __ldg(p.producer.index + next.row + own) : kNoRow;
      next_expert = next.expert;
      next_begin = next.row;
      next_column = next.own_b ? ~next.column : next.column;
      if (threadIdx.x == 0) cards.write(next);
    };
    RingPosition<kShape.stages> ring;
    look_up();
    while (!tiles.done()) {
      const int thread = ptx::thread();
      std::uint32_t from[kRows];  // source of each row that this thread copies: units of 16 bytes
      // Bit i: row i exists. Bit kRows: the row whose scale this thread copies exists.
      std::uint32_t present = next_row != kNoRow ? 1u << kRows : 0;
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        const int row = __shfl_sync(~0u, next_row, i * 4 + (thread >> 3 & 3));
        if (row != kNoRow) present |= 1u << i;
        from[i] = static_cast<std::uint32_t>(max(row, 0)) * p.producer.row_units + (thread & 7);
      }
      const std::uint32_t scale = static_cast<std::uint32_t>(max(next_row, 0)) * p.producer.blocks;
      CtaTile tile{};  // has only the fields that the loads of B, scales and low-rank rows read
      tile.expert = next_expert;
      tile.row = next_begin;
      tile.own_b = next_column < 0;
      tile.column = tile.own_b ? ~next_column : next_column;
      for (int kt = 0; kt < p.tiles.k_tiles; kt++, ring.next()) {
        const ptx::Mbarrier full = cta.full(ring.stage);
        cta.empty(ring.stage).wait(ring.parity ^ 1);
        const std::uint32_t a = cta.a(ring.stage) + target;
#pragma unroll
        for (int i = 0; i < kRows; i++) {
          ptx::copy_unit(a + i * 2048, p.producer.codes, from[i], present & 1u << i);
          from[i] += 8;
        }
        if ((present & 1u << kRows) != 0) {
          ptx::copy4(row_scales(cta, ring.stage) + own_row() * 4, p.producer.scales + scale + kt);
        }
        if (threadIdx.x < kFp8Units) {
          copy_weight_scale(p.weight_scales, tile, threadIdx.x, kt, cta, ring.stage);
        }
        full.arrive_after_copies();
        if (threadIdx.x == 0) {
          full.arrive_expecting(kShape.b_bytes());
          Gemm::B::load(p.b, tile, kt, 0, cta.b(ring.stage), full, cta.rank());
        }
        if (kt == p.tiles.k_tiles / 2) {
          tiles.next();
          look_up();
        }
      }
      // In each phase `full` expects an arrival of every thread, so all threads arrive.
#pragma unroll 1
      for (int kt = 0; kt < p.tiles.low_rank_k_tiles; kt++, ring.next()) {
        cta.empty(ring.stage).wait(ring.parity ^ 1);
        if (threadIdx.x == 0) load_low_rank<Gemm>(p, cta, ring.stage, tile, kt);
        cta.full(ring.stage).arrive();
      }
    }
  }

 private:
  static constexpr int kNoRow = -1;

  /// The row of the tile whose index this thread loads, and whose scales it copies. A warp loads
  /// the indices of the 32 rows whose codes it copies.
  static __device__ __forceinline__ int own_row() {
    const int thread = ptx::thread();
    return (thread >> 5) * 4 + (thread & 3) + (thread >> 2 & 7) * 16;
  }
};

}  // namespace sonicmoe::cuda
