// Producer: gathered rows as K. A tile is 128 columns of the source by 64 gathered rows, MN-major.
// Rows past the expert and columns past the width are zeroed by the copy.
#pragma once

#include "cuda/engine/operand_b.cuh"
#include "cuda/producers/gather_rows.cuh"

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
    static_assert(kShape.m == 128, "sixteen threads copy the 256 bytes of a row");
    const int lane = threadIdx.x & 31;
    const int first = threadIdx.x >> 4;
    const int chunk = threadIdx.x & 15;
    const std::uint32_t target =
        (chunk >> 3) * kBoxBytes + first * 128 + (((chunk & 7) ^ (first & 7)) << 4);
    // Row i of this thread in a k tile is first + 8 i. The sixteen lanes that share these rows look
    // up those of two k tiles, one each and a pair of k tiles ahead, and hand them round: a look-up
    // by every thread would take longer than the products of a k tile.
    const int looked_up = (lane >> 3 & 1) * kDepth + first + 8 * (lane & 7);
    RingPosition<kShape.stages> ring;
    for (TileStream<typename Gemm::Scheduler, kShape, Walker::kWarp> stream(cta, p.tiles);
         !stream.done(); stream.next()) {
      const Work work = Gemm::Scheduler::template work<kShape>(p.tiles, stream.tile(), cta.rank());
      const int column = work.m + chunk * 8;
      const bool inside = column < p.producer.width;
      const std::uint8_t* source = ptx::opaque(static_cast<const std::uint8_t*>(p.producer.source) +
                                               (inside ? column : 0) * kElementBytes);
      const auto look_up = [&](int kt) {
        const int row = kt * kDepth + looked_up;
        if (row >= work.depth) return 0;
        return p.producer.index != nullptr ? __ldg(p.producer.index + work.row + row)
                                           : work.row + row;
      };
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, work);
      int rows = look_up(0);
      for (int kt = 0; kt < k_tiles; kt += kTogether) {
        const int next = look_up(kt + kTogether);
#pragma unroll
        for (int u = 0; u < kTogether; u++) {
          if (kt + u >= k_tiles) break;
          // All addresses before the wait, each in registers of its own.
          const std::uint8_t* from[kRows];
#pragma unroll
          for (int i = 0; i < kRows; i++) {
            const int row = __shfl_sync(~0u, rows, u * kRows + i, 16);
            from[i] = ptx::row_address(source, row, p.producer.row_bytes);
          }
          const int left = work.depth - (kt + u) * kDepth - first;  // rows 8 i < left are present
          const int present = !inside ? 0 : left;
          const ptx::Mbarrier full = cta.full(ring.stage);
          cta.empty(ring.stage).wait(ring.parity ^ 1);
          if (threadIdx.x == 0) {
            full.arrive_expecting(kShape.b_bytes());
            Gemm::B::load(p.b, work, kt + u, k_tiles, cta.b(ring.stage), full, cta.rank());
          }
          __syncwarp();
          const std::uint32_t a = cta.a(ring.stage) + target;
#pragma unroll
          for (int i = 0; i < kRows; i++) {
            ptx::copy16(a + i * 1024, from[i], 8 * i < present ? 1u : 0u);
          }
          full.arrive_after_copies();
          ring.next();
        }
        rows = next;
      }
    }
  }

 private:
  static constexpr int kRows = kDepth / 8;  // that a thread copies of a k tile
  static constexpr int kTogether = 2;       // k tiles looked up together
};

}  // namespace sonicmoe::cuda
