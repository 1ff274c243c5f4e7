// Producer: gathered rows as K. A tile is 128 columns of the source by 64 gathered rows, MN-major.
// Rows past the expert and columns past the width are zeroed by the copy.
#pragma once

#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/hopper/producers/gather_rows.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/lane.cuh"

namespace sonicmoe::cuda {

struct GatherDepth {
  using Params = GatherRows::Params;  ///< width is M here
  static constexpr int kCopyArrivals = kWarpgroup;
  static constexpr int kTileReaders = kWarpgroup / 32;
  static constexpr Drawer kDrawer = Drawer::kConsumer;
  static constexpr Registers registers(const TileShape&) { return {56, 208}; }
  static constexpr bool kNeedsProxyFence = true;

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
    // Row i of this thread in a k tile is first + 16 i: 16 bytes of its first box, 16 of its
    // second. Of the sixteen rows that a warp copies of each of two k tiles a lane looks up one, a
    // pair of k tiles ahead, and hands it round. Look-ups by every thread would take longer than
    // the products of a k tile, and a row handed round for each copy would cost 2 to 3 % of them.
    const int looked_up =
        (lane >> 4) * kDepth + (threadIdx.x >> 5) * 4 + (lane & 3) + (lane >> 2 & 3) * 16;
    RingPosition<kShape.stages> ring;
    TileStream<typename Gemm::Scheduler, kShape, Walker::kWarp> stream(cta, p.tiles);
    const auto work_of = [&] {
      if (stream.done()) return Work{};
      const int tile = ptx::uniform(stream.tile());
      Work work = Gemm::Scheduler::template work<kShape>(p.tiles, tile, cta.rank());
      // All lanes have the same. Told so, the compiler keeps it out of their registers: 0.2 %.
      work.row = ptx::uniform(work.row);
      work.depth = ptx::uniform(work.depth);
      work.column = ptx::uniform(work.column);
      work.m = ptx::uniform(work.m);
      return work;
    };
    const auto look_up = [&](const Work& work, int kt) {
      const int row = kt * kDepth + looked_up;
      if (row >= work.depth) return 0;
      return p.producer.index != nullptr ? __ldg(p.producer.index + work.row + row)
                                         : work.row + row;
    };
    Work next_work = work_of();
    int rows = look_up(next_work, 0);
    while (!stream.done()) {
      const Work work = next_work;
      const int column = work.m + chunk * 8;
      const bool inside = column < p.producer.width;
      const bool inside_too = column + 64 < p.producer.width;
      const std::uint8_t* source = ptx::opaque(static_cast<const std::uint8_t*>(p.producer.source) +
                                               (inside ? column : 0) * kElementBytes);
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, work);
      // The next tile is looked up while this one is copied, its first rows beside the last k
      // tiles: the stages in flight do not cover one access to L2 after the other. Its number is
      // there once this tile's second pair of k tiles can be copied.
      const int ask_at = k_tiles > kTogether ? kTogether : 0;
      for (int kt = 0; kt == 0 || kt < k_tiles; kt += kTogether) {
        if (kt == ask_at) {
          stream.next();
          next_work = work_of();
        }
        const bool last = kt + kTogether >= k_tiles;
        const int next = last ? look_up(next_work, 0) : look_up(work, kt + kTogether);
#pragma unroll
        for (int u = 0; u < kTogether; u++) {
          if (kt + u >= k_tiles) break;
          // All addresses before the wait, each in registers of its own.
          const std::uint8_t* from[kRows];
#pragma unroll
          for (int i = 0; i < kRows; i++) {
            const int row = __shfl_sync(~0u, rows, (u * kRows + i) * 4 + (lane >> 3));
            from[i] = ptx::row_address(source, row, p.producer.row_bytes);
          }
          const int left = work.depth - (kt + u) * kDepth - first;  // rows 16 i < left are present
          const int present = inside ? left : 0;
          const int present_too = inside_too ? left : 0;
          const ptx::Mbarrier full = cta.full(ring.stage);
          cta.empty(ring.stage).wait(ring.parity ^ 1);
          const std::uint32_t a = cta.a(ring.stage) + target;
#pragma unroll
          for (int i = 0; i < kRows; i++) {
            ptx::copy16(a + i * 2048, from[i], 16 * i < present ? 1u : 0u);
            ptx::copy16(a + kBoxBytes + i * 2048, from[i] + kNextBox,
                        16 * i < present_too ? 1u : 0u);
          }
          full.arrive_after_copies();
          if (threadIdx.x == 0) {
            full.arrive_expecting(kShape.b_bytes());
            Gemm::B::load(p.b, work, kt + u, k_tiles, cta.b(ring.stage), full, cta.rank());
          }
          __syncwarp();
          ring.next();
        }
        rows = next;
      }
    }
  }

 private:
  static constexpr int kRows = kDepth / 16;            // that a thread copies of a k tile
  static constexpr int kTogether = 2;                  // k tiles looked up together
  static constexpr int kNextBox = 64 * kElementBytes;  // from a copy's source to the other one's
};

}  // namespace sonicmoe::cuda
