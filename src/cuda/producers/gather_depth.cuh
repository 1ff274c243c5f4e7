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
  static constexpr Registers registers(const TileShape&) { return {56, 224}; }
  static constexpr bool kNeedsProxyFence = true;

  static __device__ __forceinline__ void prefetch(const Params&) {}

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p,
                                             const Cta<Gemm::kShape>& cta, int count) {
    constexpr TileShape kShape = Gemm::kShape;
    static_assert(kShape.m == 128, "sixteen threads copy the 256 bytes of a row");
    constexpr int kRows = kDepth / 8;  // that this thread copies of a k tile
    const int lane = threadIdx.x & 31;
    const int first = threadIdx.x >> 4;
    const int chunk = threadIdx.x & 15;
    // Sixteen lanes look up the sixteen rows of their warp, two k tiles ahead, and hand them round:
    // a look-up by every thread would take longer than the products of a k tile.
    const int looked_up = (threadIdx.x >> 5) * 2 + (lane & 1) + 8 * ((lane & 15) >> 1);
    const std::uint32_t target =
        (chunk >> 3) * kBoxBytes + first * 128 + (((chunk & 7) ^ (first & 7)) << 4);
    RingPosition<kShape.stages> ring;
    for (TileStream<kShape, Walker::kWarp> stream(cta, count); !stream.done(); stream.next()) {
      const Work work = Gemm::Scheduler::template work<kShape>(p.tiles, stream.tile(), cta.rank());
      const int column = work.m + chunk * 8;
      const bool inside = column < p.producer.width;
      const auto* source = static_cast<const std::uint8_t*>(p.producer.source) +
                           (inside ? column : 0) * static_cast<std::int64_t>(kElementBytes);
      const auto look_up = [&](int kt) {
        const int row = kt * kDepth + looked_up;
        if (row >= work.depth) return -1;
        return p.producer.index != nullptr ? __ldg(p.producer.index + work.row + row)
                                           : work.row + row;
      };
      int rows = look_up(0);
      int next = look_up(1);
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, work);
      for (int kt = 0; kt < k_tiles; kt++, ring.next()) {
        const int after = look_up(kt + 2);
        const ptx::Mbarrier full = cta.full(ring.stage);
        cta.empty(ring.stage).wait(ring.parity ^ 1);
        if (threadIdx.x == 0) {
          full.arrive_expecting(kShape.b_bytes());
          Gemm::B::load(p.b, work, kt, k_tiles, cta.b(ring.stage), full, cta.rank());
        }
        __syncwarp();
        const std::uint32_t a = cta.a(ring.stage) + target;
#pragma unroll
        for (int i = 0; i < kRows; i++) {
          const int row = __shfl_sync(~0u, rows, 2 * i + (lane >> 4));
          const std::int64_t offset = static_cast<std::int64_t>(max(row, 0)) * p.producer.row_bytes;
          ptx::copy16(a + i * 1024, source + offset, row >= 0 && inside ? 1u : 0u);
        }
        full.arrive_after_copies();
        rows = next;
        next = after;
      }
    }
  }
};

}  // namespace sonicmoe::cuda
