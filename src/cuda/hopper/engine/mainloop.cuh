// The consumers' loop over K: wait for a stage, issue four k16 steps of wgmma, release the previous
// stage.
#pragma once

#include <utility>

#include "cuda/hopper/engine/pipeline.cuh"
#include "cuda/hopper/ptx/wgmma.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "wgmma_generated.cuh"

namespace sonicmoe::cuda {

/// Bytes from one k16 step to the next inside a stage, and the descriptor's leading offset.
constexpr int k16_bytes(Major major) { return major == Major::kK ? 32 : 2048; }
constexpr int leading_bytes(Major major) { return major == Major::kK ? 16 : kBoxBytes; }

/// The part of a tile that a consumer warpgroup multiplies.
struct WarpgroupTile {
  int warpgroup;
  int row_blocks;  ///< of 64 rows; 0: the warpgroup only waits for the stages and releases them
  int columns;     ///< of the output, from the tile's first column to the end
  int k_tiles;
  int depth;  ///< K, where it varies by expert
};

/// Calls f with the constants 0 .. kCount - 1.
template <int kCount, class F>
__device__ __forceinline__ void for_each_index(F f) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (f(std::integral_constant<int, kIndex>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

template <class Gemm>
struct Mainloop {
  static constexpr TileShape kShape = Gemm::kShape;
  using Accumulator = float[kShape.row_blocks()][kShape.n / 2];
  using Ring = RingPosition<kShape.stages>;

  /// Issues the products of a tile. While deferred.pending(), calls deferred.run(kt) under the
  /// products of k tile kt, and after the last k tile until nothing is pending. All cases share one
  /// loop with branches: several loops would be compiled into each of 156 kernels, and with short
  /// tiles the instruction cache would have to fetch their code again and again.
  template <class Deferred>
  static __device__ __forceinline__ void run(Accumulator& acc, const Cta<kShape>& cta, Ring& ring,
                                             const WarpgroupTile& tile, Deferred& deferred) {
    const int full = full_k_tiles(tile);
#pragma unroll 1
    for (int kt = 0; kt < tile.k_tiles || deferred.pending(); kt++) {
      const bool multiplies = kt < tile.k_tiles;
      if (multiplies) {
        cta.full(ring.stage).wait(ring.parity);
        if (kt < full) {
          if constexpr (Gemm::Producer::kNeedsProxyFence) ptx::fence_async_shared();
          multiply<kShape.n>(acc, cta, ring.stage, tile.warpgroup, kt != 0);
        } else {
          multiply_partial(acc, cta, ring.stage, tile, kt);
        }
        ptx::wgmma_wait<1>();
        if (kt > 0) release_stage(cta, ring.previous_stage());
      }
      if (deferred.pending()) deferred.run(kt);
      if (multiplies) ring.next();
    }
  }

  /// As run(), for tiles of at least kPieces k tiles, all of them full: piece(0), piece(1), ... run
  /// under the first k tiles, unrolled.
  template <int kPieces, class Piece>
  static __device__ __forceinline__ void run_unrolled(Accumulator& acc, const Cta<kShape>& cta,
                                                      Ring& ring, const WarpgroupTile& tile,
                                                      Piece piece) {
    const auto next = [&](bool accumulate) {
      cta.full(ring.stage).wait(ring.parity);
      if constexpr (Gemm::Producer::kNeedsProxyFence) ptx::fence_async_shared();
      multiply<kShape.n>(acc, cta, ring.stage, tile.warpgroup, accumulate);
      ptx::wgmma_wait<1>();
      if (accumulate) release_stage(cta, ring.previous_stage());
      ring.next();
    };
    for_each_index<kPieces>([&]<int kPiece>(std::integral_constant<int, kPiece> index) {
      next(kPiece != 0);
      piece(index);
    });
#pragma unroll 1
    for (int kt = kPieces; kt < tile.k_tiles; kt++) next(true);
  }
  static __device__ __forceinline__ bool all_full(const WarpgroupTile& tile) {
    return full_k_tiles(tile) == tile.k_tiles;
  }

  /// Waits for the last products and releases their stage. ptxas must see that every path from
  /// run() comes here; else it serialises the wgmma.
  static __device__ __forceinline__ void finish(const Cta<kShape>& cta, const Ring& ring,
                                                const WarpgroupTile& tile) {
    ptx::wgmma_wait<0>();
    if (tile.k_tiles > 0) release_stage(cta, ring.previous_stage());
  }

 private:
  /// Zeroes the rows of B from `rows` to the end of their k16 step. These rows belong to another
  /// expert or are not initialised, and may hold NaN: A is zero there, but zero times NaN is NaN.
  /// Each warpgroup zeroes some of the rows and reads all of them, so each waits for the other.
  static __device__ __forceinline__ void clear_tail(const Cta<kShape>& cta, int stage, int rows) {
    constexpr int kChunks = kShape.n / 8;    // 16-byte chunks of a row
    constexpr int kTogether = 32 / kChunks;  // rows that a warp clears at once
    static_assert(kTogether * kChunks == 32);
    const int lane = threadIdx.x & 31;
    const int chunk = lane % kChunks;
    const std::uint32_t at = cta.b(stage) + chunk / 8 * kBoxBytes + chunk % 8 * 16;
    const int end = (rows + 15) / 16 * 16;
    const int warp = threadIdx.x / 32 - kWarpgroup / 32;
#pragma unroll 1
    for (int row = rows + warp * kTogether + lane / kChunks; row < end; row += 2 * 4 * kTogether) {
      ptx::store_zero16(at + row * 128);
    }
    ptx::fence_async_shared();
    sync(NamedBarrier::kTail, kConsumers * kWarpgroup);
  }

  /// The number of full k tiles: those that are multiplied in all rows, columns and depth. The
  /// others go through multiply_partial(). So run() makes one comparison per full k tile.
  static __device__ __forceinline__ int full_k_tiles(const WarpgroupTile& tile) {
    constexpr int kNarrow = kShape.n > 128 ? 128 : 64;
    if (tile.row_blocks < kShape.row_blocks() || (Gemm::kNarrows && tile.columns <= kNarrow))
      return 0;
    return Gemm::Scheduler::kFixedDepth ? tile.k_tiles : tile.depth / kDepth;
  }

  template <int kColumns>
  static __device__ __forceinline__ void multiply(Accumulator& acc, const Cta<kShape>& cta,
                                                  int stage, int warpgroup, bool accumulate) {
    const Operands from = operands(cta, stage, warpgroup);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) {
      step<kShape.row_blocks(), kColumns>(acc, from, k, accumulate || k != 0);
    }
    ptx::wgmma_commit();
  }

  /// Multiplies only the rows, columns and depth that k tile `kt` has; without rows, nothing.
  static __device__ __forceinline__ void multiply_partial(Accumulator& acc, const Cta<kShape>& cta,
                                                          int stage, const WarpgroupTile& tile,
                                                          int kt) {
    int depth = kDepth;
    if constexpr (!Gemm::Scheduler::kFixedDepth) {
      depth = min(kDepth, tile.depth - kt * kDepth);
      if (depth < kDepth) clear_tail(cta, stage, depth);
    }
    if (tile.row_blocks == 0) return;
    if constexpr (Gemm::Producer::kNeedsProxyFence) ptx::fence_async_shared();
    // Each branch has its own fence, products and commit, on one path: else ptxas serialises the
    // wgmma.
    if (Gemm::kNarrows && tile.columns <= 64 && depth == kDepth) {
      multiply<64>(acc, cta, stage, tile.warpgroup, kt != 0);
    } else if (Gemm::kNarrows && kShape.n > 128 && tile.columns <= 128 && depth == kDepth) {
      multiply<128>(acc, cta, stage, tile.warpgroup, kt != 0);
    } else if constexpr (kShape.row_blocks() > 1 || !Gemm::Scheduler::kFixedDepth) {
      const Operands from = operands(cta, stage, tile.warpgroup);
#pragma unroll 1
      for (int k = 0; k * 16 < depth; k++) {
        ptx::wgmma_fence();
        step<1, kShape.n>(acc, from, k, kt != 0 || k != 0);
        ptx::wgmma_commit();
      }
    }
  }

  /// The operands in a stage: the warpgroup's rows of A, and all of B.
  struct Operands {
    ptx::SwizzledOperand a;
    ptx::SwizzledOperand b;
  };
  static __device__ __forceinline__ Operands operands(const Cta<kShape>& cta, int stage,
                                                      int warpgroup) {
    const int rows_before = kShape.ping_pong() ? 0 : warpgroup * kShape.warpgroup_rows();
    return {{cta.a(stage) + rows_before * (kDepth * kElementBytes), leading_bytes(Gemm::kMajorA)},
            {cta.b(stage), leading_bytes(Gemm::kMajorB)}};
  }

  /// The k-th k16 step of a stage.
  template <int kRowBlocks, int kColumns>
  static __device__ __forceinline__ void step(Accumulator& acc, const Operands& from, int k,
                                              bool accumulate) {
#pragma unroll
    for (int h = 0; h < kRowBlocks; h++) {
      auto& block = reinterpret_cast<float(&)[kColumns / 2]>(acc[h]);
      ptx::Wgmma<typename Gemm::Element, kColumns, Gemm::kMajorA == Major::kMN,
                 Gemm::kMajorB == Major::kMN>::run(block,
                                                   from.a.at(k * k16_bytes(Gemm::kMajorA) +
                                                             h * kBoxBytes),
                                                   from.b.at(k * k16_bytes(Gemm::kMajorB)),
                                                   accumulate);
    }
  }
};

}  // namespace sonicmoe::cuda
