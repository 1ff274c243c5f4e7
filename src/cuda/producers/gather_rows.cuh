// Producer: rows of a token matrix gathered by index, copied by four warps of cp.async while one
// thread also issues B by TMA. Rows past the expert and k past the width are zeroed by the copy
// itself, so that no ordinary store meets the ring.
#pragma once

#include "cuda/engine/operand_b.cuh"

namespace sonicmoe::cuda {

struct GatherRows {
  struct Params {
    const void* source;         ///< (T, width) 16-bit elements
    const std::int32_t* index;  ///< row of `source` for every grouped row; null: the row itself
    std::int32_t row_bytes;     ///< stride of `source`, below 2 GiB
    std::int32_t width;         ///< K, a multiple of 8
  };
  static constexpr int kCopyArrivals = kWarpgroup;
  static constexpr int kTileReaders = kWarpgroup / 32;
  static constexpr Drawer kDrawer = Drawer::kConsumer;
  static constexpr Registers registers(const TileShape&) { return {72, 216}; }
  static constexpr bool kNeedsProxyFence = true;  // cp.async writes through the generic proxy

  static __device__ __forceinline__ void prefetch(const Params&) {}

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p,
                                             const Cta<Gemm::kShape>& cta, int count) {
    constexpr TileShape kShape = Gemm::kShape;
    constexpr int kRows = kShape.m / 16;  // of this thread: eight threads copy a 128-byte row
    constexpr int kTogether = 4;          // k tiles whose copies differ by a constant
    constexpr int kStep = kDepth * kElementBytes;
    const int first = threadIdx.x >> 3;
    const int chunk = threadIdx.x & 7;
    const std::uint32_t target = first * 128 + ((chunk ^ (first & 7)) << 4);
    const auto* source = static_cast<const std::uint8_t*>(p.producer.source) + chunk * 16;

    RingPosition<kShape.stages> ring;
    for (TileStream<kShape, Walker::kWarp> stream(cta, count); !stream.done(); stream.next()) {
      const Work work = Gemm::Scheduler::template work<kShape>(p.tiles, stream.tile(), cta.rank());
      // The stages in flight cover the latency of these indices; fetching them a tile ahead would
      // cost registers that a producer does not have. Whole pointers are held, in registers that
      // only change every few k tiles: computed anew, or moved at each, they would be free again
      // only once a copy has read them, and copies would wait for each other (5 to 9 % slower).
      const std::uint8_t* from[kRows];
      std::uint32_t present = 0;
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        const int row = first + 16 * i;
        std::int64_t index = 0;
        if (row < work.left) {
          present |= 1u << i;
          index = work.row + row;
          if (p.producer.index != nullptr) index = __ldg(p.producer.index + index);
        }
        from[i] = source + index * p.producer.row_bytes;
      }
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, work);
      for (int kt = 0; kt < k_tiles; kt += kTogether) {
#pragma unroll
        for (int u = 0; u < kTogether; u++) {
          if (kt + u >= k_tiles) break;
          const ptx::Mbarrier full = cta.full(ring.stage);
          cta.empty(ring.stage).wait(ring.parity ^ 1);
          if (threadIdx.x == 0) {
            full.arrive_expecting(kShape.b_bytes());
            Gemm::B::load(p.b, work, kt + u, k_tiles, cta.b(ring.stage), full, cta.rank());
          }
          if ((kt + u) * kDepth + chunk * 8 >= p.producer.width) present = 0;  // the last k tile
          const std::uint32_t a = cta.a(ring.stage) + target;
#pragma unroll
          for (int i = 0; i < kRows; i++) {
            ptx::copy16(a + i * 2048, from[i] + u * kStep, present & 1u << i);
          }
          full.arrive_after_copies();
          ring.next();
        }
#pragma unroll
        for (int i = 0; i < kRows; i++) ptx::advance<kTogether * kStep>(from[i]);
      }
    }
  }
};

}  // namespace sonicmoe::cuda
