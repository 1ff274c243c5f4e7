// Producer: rows of a token matrix gathered by index, copied by four warps of cp.async while one
// thread also issues B by TMA, and what the epilogue reads. Rows past the expert and k past the
// width are zeroed by the copy itself, so that no ordinary store of a producer meets the ring.
#pragma once

#include "cuda/hopper/engine/operand_b.cuh"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/copy.cuh"

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
  /// What A holds of a tile needs 232. dH, which has no boxes, holds nothing, and its copies are
  /// 0.5 % slower with 40.
  static constexpr Registers registers(const TileShape& shape) {
    return shape.boxes == 0 ? Registers{56, 224} : Registers{40, 232};
  }
  static constexpr bool kNeedsProxyFence = true;  // cp.async writes through the generic proxy

  static __device__ __forceinline__ void prefetch(const Params&) {}

  template <class Gemm>
  static __device__ __forceinline__ void run(const typename Gemm::Params& p,
                                             const Cta<Gemm::kShape>& cta) {
    constexpr TileShape kShape = Gemm::kShape;
    constexpr int kRows = kShape.m / 16;  // of this thread: eight threads copy a 128-byte row
    constexpr int kTogether = 4;          // k tiles whose copies differ by a constant
    constexpr int kStep = kDepth * kElementBytes;
    static_assert(kRows * 4 == 32, "a warp copies as many rows as it has lanes");
    constexpr bool kFeeds = RingEpilogue<typename Gemm::Epilogue, kShape>;
    const int lane = threadIdx.x & 31;
    const int first = threadIdx.x >> 3;
    const int chunk = threadIdx.x & 7;
    const std::uint32_t target = first * 128 + ((chunk ^ (first & 7)) << 4);
    const auto* source = static_cast<const std::uint8_t*>(p.producer.source) + chunk * 16;

    TileStream<typename Gemm::Scheduler, kShape, Walker::kWarp> stream(cta, p.tiles);
    // What the next tile needs is looked up while this one is copied: the stages in flight do not
    // cover it. Where stages are filled for the epilogue too, it is looked up behind these, under
    // the epilogue: a tile begins with no stage to spare. A lane looks up a row for its warp.
    int next_row = kNoRow;
    int next_expert = 0;
    int next_column = 0;  // complemented where the CTA is alone: registers are scarce
    int next_begin = 0;   // complemented where there are no rows
    const auto look_up = [&] {
      if (stream.done()) return;
      const Work next = Gemm::Scheduler::template work<kShape>(p.tiles, stream.tile(), cta.rank());
      const int row = (threadIdx.x >> 5) * 4 + (lane & 3) + (lane >> 2) * 16;
      next_row = source_row(p.producer, next, row);
      next_expert = next.expert;
      next_column = next.alone ? ~next.column : next.column;
      if (kFeeds) next_begin = next.left > 0 ? next.row : ~next.row;
    };
    const auto go_on = [&] {
      stream.next();
      look_up();
    };
    RingPosition<kShape.stages> ring;
    look_up();
    while (!stream.done()) {
      // Whole pointers are held, in registers that only change every few k tiles: computed anew, or
      // moved at each, they would be free again only once a copy has read them, and copies would
      // wait for each other (5 to 9 % slower).
      const std::uint8_t* from[kRows];
      std::uint32_t present = 0;
#pragma unroll
      for (int i = 0; i < kRows; i++) {
        const int row = __shfl_sync(~0u, next_row, i * 4 + (lane >> 3));
        if (row != kNoRow) present |= 1u << i;
        from[i] = source + static_cast<std::int64_t>(max(row, 0)) * p.producer.row_bytes;
      }
      Work tile{};  // as far as B and the epilogue's input ask
      tile.expert = next_expert;
      tile.alone = next_column < 0;
      tile.column = tile.alone ? ~next_column : next_column;
      tile.left = next_begin < 0 ? 0 : 1;
      tile.row = next_begin;
      const int k_tiles = Gemm::Scheduler::k_tiles(p.tiles, tile);
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
            Gemm::B::load(p.b, tile, kt + u, k_tiles, cta.b(ring.stage), full, cta.rank());
          }
          ring.next();
        }
        if (!kFeeds && kt == 0) go_on();
#pragma unroll
        for (int i = 0; i < kRows; i++) ptx::advance<kTogether * kStep>(from[i]);
      }
      if constexpr (kFeeds) {
        feed<Gemm>(p, cta, ring, tile);
        go_on();
      }
    }
  }

 private:
  static constexpr int kNoRow = -1;

  /// The epilogue's input, behind the tile's products. Every copying thread arrives at its stages
  /// too.
  template <class Gemm>
  static __device__ __forceinline__ void feed(const typename Gemm::Params& p,
                                              const Cta<Gemm::kShape>& cta,
                                              RingPosition<Gemm::kShape.stages>& ring,
                                              const Work& tile) {
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

  /// Where row `row` of a tile lies in the source.
  static __device__ __forceinline__ int source_row(const Params& p, const Work& work, int row) {
    if (row >= work.left) return kNoRow;
    return p.index != nullptr ? __ldg(p.index + work.row + row) : work.row + row;
  }
};

}  // namespace sonicmoe::cuda
