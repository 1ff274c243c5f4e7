// Producer of depth products: the gathered rows are K. A k tile of A is 128 columns of the source
// by 64 gathered rows, MN-major. cp.async zeroes rows past the expert and columns past the width.
#pragma once

#include "cuda/hopper/engine/concepts.cuh"
#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/hopper/producers/gather_rows.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

struct GatherDepth {
  using Params = GatherRowsParams;  ///< width is M here
  static constexpr int kCopyArrivals = kWarpgroup;
  static constexpr int kQueueReaders = kWarpgroup / 32;
  static constexpr SchedulerThread kScheduler = SchedulerThread::kConsumer;
  static constexpr Registers registers(const TileShape&) { return {56, 208}; }
  static constexpr bool kNeedsProxyFence = true;
  static constexpr bool kMayStartEarly = true;

  static __device__ __forceinline__ void prefetch(const Params&) {}

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p,
                                             const Cta<Gemm::kShape>& cta) {
    constexpr TileShape kShape = Gemm::kShape;
    static_assert(kShape.m == 128, "eight threads copy the two boxes of a row");
    const int lane = threadIdx.x & 31;
    const int first = threadIdx.x >> 3;
    const int chunk = threadIdx.x & 7;
    const std::uint32_t target = first * 128 + ((chunk ^ (first & 7)) << 4);
    // A thread copies rows first + 16 i of every k tile: 16 bytes of the first box (64 columns) and
    // 16 bytes of the second. So a warp copies sixteen rows of a k tile. Row indices are loaded for
    // two k tiles at once and two k tiles ahead: each lane loads one of 32 indices, and shuffles
    // give it to the lanes that copy this row. If every thread loaded all of its indices, this
    // would take longer than a k tile's products. One shuffle per copy, instead of one for the two
    // copies of a row, would cost 2 to 3 % of the products' time (H200), because shuffles use the
    // shared memory that wgmma reads.
    const int looked_up =
        (lane >> 4) * kDepth + (threadIdx.x >> 5) * 4 + (lane & 3) + (lane >> 2 & 3) * 16;
    if (p.begins == Begins::kIndependent) {
      if (p.release_count != nullptr) {
        // The kernel before has incremented the count, also after a fault: this does not wait long.
        while (ptx::acquire_word(p.release_count) == 0) {
        }
      }
      if (threadIdx.x == 0) ptx::fence_async();
    }
    RingPosition<kShape.stages> ring;
    TileIterator<typename Gemm::Scheduler, kShape, QueueReader::kWarp> tiles(cta, p.tiles);
    const auto tile_of = [&] {
      if (tiles.done()) return CtaTile{};
      const int index = ptx::uniform(tiles.index());
      CtaTile tile = Gemm::Scheduler::template tile<kShape>(p.tiles, index, cta.rank());
      // The values are then in uniform registers instead of registers of each lane: 0.2 % faster
      // (H200).
      tile.row = ptx::uniform(tile.row);
      tile.depth = ptx::uniform(tile.depth);
      tile.column = ptx::uniform(tile.column);
      tile.output_row = ptx::uniform(tile.output_row);
      return tile;
    };
    // Coherent loads: the kernel may run before its griddepcontrol.wait (Begins).
    const auto look_up = [&](const CtaTile& tile, int kt) {
      const int row = kt * kDepth + looked_up;
      if (row >= tile.depth) return 0;
      return p.producer.index != nullptr ? __ldca(p.producer.index + tile.row + row)
                                         : tile.row + row;
    };
    CtaTile next_tile = tile_of();
    int rows = look_up(next_tile, 0);
    while (!tiles.done()) {
      const CtaTile tile = next_tile;
      const int column = tile.output_row + chunk * 8;
      const bool inside = column < p.producer.width;
      const bool second_inside = column + 64 < p.producer.width;
      const std::uint8_t* source = ptx::opaque(static_cast<const std::uint8_t*>(p.producer.source) +
                                               (inside ? column : 0) * kElementBytes);
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, tile);
      // The next tile is computed while this tile is copied, before the second pair of k tiles: by
      // then its index has usually arrived. The next tile's first row indices are loaded with this
      // tile's last k tiles. If both happened between two tiles, the stages in flight would not
      // cover the latency of two dependent accesses to L2.
      const int ask_at = k_tiles > kTogether ? kTogether : 0;
      for (int kt = 0; kt == 0 || kt < k_tiles; kt += kTogether) {
        if (kt == ask_at) {
          tiles.next();
          next_tile = tile_of();
        }
        const bool last = kt + kTogether >= k_tiles;
        const int next = last ? look_up(next_tile, 0) : look_up(tile, kt + kTogether);
#pragma unroll
        for (int u = 0; u < kTogether; u++) {
          if (kt + u >= k_tiles) break;
          // All addresses are computed before the wait, into registers of their own, so that the
          // copies do not wait for each other.
          const std::uint8_t* from[kRows];
#pragma unroll
          for (int i = 0; i < kRows; i++) {
            const int row = __shfl_sync(~0u, rows, (u * kRows + i) * 4 + (lane >> 3));
            from[i] = ptx::row_address(source, row, p.producer.row_bytes);
          }
          const int left = tile.depth - (kt + u) * kDepth - first;  // row i exists if 16 i < left
          const int present = inside ? left : 0;
          const int second_present = second_inside ? left : 0;
          const ptx::Mbarrier full = cta.full(ring.stage);
          cta.empty(ring.stage).wait(ring.parity ^ 1);
          const std::uint32_t a = cta.a(ring.stage) + target;
#pragma unroll
          for (int i = 0; i < kRows; i++) {
            ptx::copy16(a + i * 2048, from[i], 16 * i < present ? 1u : 0u);
            ptx::copy16(a + kBoxBytes + i * 2048, from[i] + kNextBox,
                        16 * i < second_present ? 1u : 0u);
          }
          full.arrive_after_copies();
          if (threadIdx.x == 0) {
            full.arrive_expecting(kShape.b_bytes());
            Gemm::B::load(p.b, tile, kt + u, 0, cta.b(ring.stage), full, cta.rank());
          }
          __syncwarp();
          ring.next();
        }
        rows = next;
      }
    }
  }

 private:
  static constexpr int kRows = kDepth / 16;            // rows that a thread copies of a k tile
  static constexpr int kTogether = 2;                  // k tiles whose indices are loaded together
  static constexpr int kNextBox = 64 * kElementBytes;  // from a row's first box to its second
};

}  // namespace sonicmoe::cuda
