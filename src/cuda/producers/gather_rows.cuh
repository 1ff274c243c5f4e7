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
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;
  static constexpr bool kHasSpareWarp = false;
  static constexpr bool kNeedsProxyFence = true;  // cp.async writes through the generic proxy

  static __device__ __forceinline__ void prefetch(const Params&) {}

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p,
                                             const Cta<Gemm::kShape>& cta, int count) {
    constexpr TileShape kShape = Gemm::kShape;
    constexpr int kRows = kShape.m / 16;  // of this thread: eight threads copy a 128-byte row
    const int first = threadIdx.x >> 3;
    const int chunk = threadIdx.x & 7;
    const std::uint32_t target = first * 128 + ((chunk ^ (first & 7)) << 4);
    const auto* source = static_cast<const std::uint8_t*>(p.producer.source) + chunk * 16;

    RingPosition<kShape.stages> ring;
    for (TileStream<kShape> stream(cta, count); !stream.done(); stream.next()) {
      const Work work = Gemm::Scheduler::template work<kShape>(p.tiles, stream.tile());
      // The stages in flight cover the latency of these indices; fetching them a tile ahead would
      // cost registers that a producer does not have.
      const std::uint8_t* from[kRows];
      std::uint32_t present = 0;
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        const int row = cta.rank() * kShape.m + first + 16 * i;
        std::int64_t index = 0;
        if (row < work.left) {
          present |= 1u << i;
          index = work.row + row;
          if (p.producer.index != nullptr) index = __ldg(p.producer.index + index);
        }
        from[i] = source + index * p.producer.row_bytes;
      }
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, work);
      for (int kt = 0; kt < k_tiles; kt++, ring.next()) {
        const ptx::Mbarrier full = cta.full(ring.stage);
        cta.empty(ring.stage).wait(ring.parity ^ 1);
        if (threadIdx.x == 0) {
          full.arrive_expecting(kShape.b_bytes());
          Gemm::B::load(p.b, work, kt, k_tiles, cta.b(ring.stage), full, cta.rank());
        }
        const std::uint32_t a = cta.a(ring.stage) + target;
        const int k = kt * kDepth + chunk * 8;
        const std::uint32_t mask = k < p.producer.width ? present : 0u;
#pragma unroll
        for (int i = 0; i < kRows; i++) {
          ptx::copy16(a + i * 2048, from[i], (mask >> i & 1) != 0);
          from[i] += kDepth * kElementBytes;
        }
        full.arrive_after_copies();
      }
    }
  }
};

}  // namespace sonicmoe::cuda
