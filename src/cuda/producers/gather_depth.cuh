// Producer: gathered rows as K. A tile is 128 columns of the source by 64 gathered rows, MN-major.
// Rows past the expert and columns past the width are zeroed by the copy.
#pragma once

#include "cuda/engine/operand_b.cuh"
#include "cuda/producers/gather_rows.cuh"

namespace sonicmoe::cuda {

struct GatherDepth {
  using Params = GatherRows::Params;  ///< width is M here
  static constexpr int kCopyArrivals = kWarpgroup;
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 224;
  static constexpr bool kHasSpareWarp = false;
  static constexpr bool kNeedsProxyFence = true;

  static __device__ __forceinline__ void prefetch(const Params&) {}

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p,
                                             const Cta<Gemm::kShape>& cta, int count) {
    constexpr TileShape kShape = Gemm::kShape;
    static_assert(kShape.m == 128, "sixteen threads copy the 256 bytes of a row");
    constexpr int kRows = kDepth / 8;  // of this thread
    const int first = threadIdx.x >> 4;
    const int chunk = threadIdx.x & 15;
    const std::uint32_t target =
        (chunk >> 3) * kBoxBytes + first * 128 + (((chunk & 7) ^ (first & 7)) << 4);
    RingPosition<kShape.stages> ring;
    for (TileStream<kShape> stream(cta, count); !stream.done(); stream.next()) {
      const Work work = Gemm::Scheduler::template work<kShape>(p.tiles, stream.tile());
      const int column = work.m + cta.rank() * kShape.m + chunk * 8;
      const bool inside = column < p.producer.width;
      const auto* source = static_cast<const std::uint8_t*>(p.producer.source) +
                           (inside ? column : 0) * static_cast<std::int64_t>(kElementBytes);
      // Rows of the next k tile are looked up while this one waits for its stage.
      int next[kRows];
      const auto fetch = [&](int kt) {
#pragma unroll
        for (int i = 0; i < kRows; i++) {
          const int row = kt * kDepth + first + 8 * i;
          next[i] = -1;
          if (row < work.depth && inside) {
            next[i] = p.producer.index != nullptr ? __ldg(p.producer.index + work.row + row)
                                                  : work.row + row;
          }
        }
      };
      fetch(0);
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, work);
      for (int kt = 0; kt < k_tiles; kt++, ring.next()) {
        int from[kRows];
#pragma unroll
        for (int i = 0; i < kRows; i++) from[i] = next[i];
        fetch(kt + 1);
        const ptx::Mbarrier full = cta.full(ring.stage);
        cta.empty(ring.stage).wait(ring.parity ^ 1);
        if (threadIdx.x == 0) {
          full.arrive_expecting(kShape.b_bytes());
          Gemm::B::load(p.b, work, kt, k_tiles, cta.b(ring.stage), full, cta.rank());
        }
        const std::uint32_t a = cta.a(ring.stage) + target;
#pragma unroll
        for (int i = 0; i < kRows; i++) {
          const std::int64_t row = static_cast<std::int64_t>(max(from[i], 0));
          ptx::copy16(a + i * 1024, source + row * p.producer.row_bytes, from[i] >= 0);
        }
        full.arrive_after_copies();
      }
    }
  }
};

}  // namespace sonicmoe::cuda
