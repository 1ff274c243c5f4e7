// The consumers' loop over K: wait for a stage, four k16 steps of wgmma, give back the stage
// before.
#pragma once

#include <utility>

#include "cuda/hopper/engine/pipeline.cuh"
#include "cuda/hopper/ptx/tma.cuh"
#include "cuda/hopper/ptx/wgmma.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "wgmma_generated.cuh"

namespace sonicmoe::cuda {

/// Bytes from one k16 step to the next inside a stage, and the descriptor's leading offset.
constexpr int k16_bytes(Major major) { return major == Major::kK ? 32 : 2048; }
constexpr int leading_bytes(Major major) { return major == Major::kK ? 16 : kBoxBytes; }

inline constexpr int kTailBarrier = 5;  // named barrier of both consumer warpgroups

/// What a consumer warpgroup multiplies of a tile.
struct Part {
  int warpgroup;
  int halves;   ///< 64-row halves, all of them valid; none: the stages are only passed on
  int columns;  ///< that the output has from the tile's first on
  int k_tiles;
  int depth;  ///< rows, where rows are K
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
  using Accumulator = float[kShape.halves()][kShape.n / 2];
  using Ring = RingPosition<kShape.stages>;

  /// Issues the products of a part. `beside` is other work: beside.run(kt) is called under the
  /// products of k tile kt, and past the last one for as long as beside.pending(). One loop with
  /// questions in it, because code is fetched anew where little is multiplied, and compiled for
  /// every kernel.
  template <class Beside>
  static __device__ __forceinline__ void run(Accumulator& acc, const Cta<kShape>& cta, Ring& ring,
                                             const Part& part, Beside& beside) {
    const int whole = whole_k_tiles(part);
#pragma unroll 1
    for (int kt = 0; kt < part.k_tiles || beside.pending(); kt++) {
      const bool multiplies = kt < part.k_tiles;
      if (multiplies) {
        cta.full(ring.stage).wait(ring.parity);
        if (kt < whole) {
          if constexpr (Gemm::Producer::kNeedsProxyFence) ptx::fence_async_shared();
          multiply<kShape.n>(acc, cta, ring.stage, part.warpgroup, kt != 0);
        } else {
          multiply_some(acc, cta, ring.stage, part, kt);
        }
        ptx::wgmma_wait<1>();
        if (kt > 0) release_stage(cta, ring.before());
      }
      if (beside.pending()) beside.run(kt);
      if (multiplies) ring.next();
    }
  }

  /// As run() where all k tiles are whole(), kPieces or more: piece(0), piece(1) ... under the
  /// first ones, unrolled.
  template <int kPieces, class Piece>
  static __device__ __forceinline__ void run_unrolled(Accumulator& acc, const Cta<kShape>& cta,
                                                      Ring& ring, const Part& part, Piece piece) {
    const auto next = [&](bool accumulate) {
      cta.full(ring.stage).wait(ring.parity);
      if constexpr (Gemm::Producer::kNeedsProxyFence) ptx::fence_async_shared();
      multiply<kShape.n>(acc, cta, ring.stage, part.warpgroup, accumulate);
      ptx::wgmma_wait<1>();
      if (accumulate) release_stage(cta, ring.before());
      ring.next();
    };
    for_each_index<kPieces>([&]<int kPiece>(std::integral_constant<int, kPiece> index) {
      next(kPiece != 0);
      piece(index);
    });
#pragma unroll 1
    for (int kt = kPieces; kt < part.k_tiles; kt++) next(true);
  }
  static __device__ __forceinline__ bool whole(const Part& part) {
    return whole_k_tiles(part) == part.k_tiles;
  }

  /// Until the products are done. ptxas must see that every path from run() comes here.
  static __device__ __forceinline__ void finish(const Cta<kShape>& cta, const Ring& ring,
                                                const Part& part) {
    ptx::wgmma_wait<0>();
    if (part.k_tiles > 0) release_stage(cta, ring.before());
  }

 private:
  /// Rows of B past the expert are its neighbour's, or unset: zero times NaN would be NaN. Of the
  /// sixteen rows of the last step, both warpgroups clear what is past it; both read them, so both
  /// wait.
  static __device__ __forceinline__ void clear_tail(const Cta<kShape>& cta, int stage, int rows) {
    constexpr int kChunks = kShape.n / 8;  // 16-byte chunks of a row
    static_assert(kChunks == 32, "a row by each warp");
    const int chunk = threadIdx.x & 31;
    const std::uint32_t at = cta.b(stage) + chunk / 8 * kBoxBytes + chunk % 8 * 16;
    const int end = (rows + 15) / 16 * 16;
#pragma unroll 1
    for (int row = rows + threadIdx.x / 32 - kWarpgroup / 32; row < end; row += 2 * 4) {
      ptx::store_zero16(at + row * 128);
    }
    ptx::fence_async_shared();
    ptx::named_sync(kTailBarrier, kConsumers * kWarpgroup);
  }

  /// How many k tiles, from the first on, are multiplied in all rows, columns and depth: one
  /// question for what is frequent.
  static __device__ __forceinline__ int whole_k_tiles(const Part& part) {
    constexpr int kNarrow = kShape.n > 128 ? 128 : 64;
    if (part.halves < kShape.halves() || (Gemm::kNarrows && part.columns <= kNarrow)) return 0;
    return Gemm::Scheduler::kFixedDepth ? part.k_tiles : part.depth / kDepth;
  }

  template <int kColumns>
  static __device__ __forceinline__ void multiply(Accumulator& acc, const Cta<kShape>& cta,
                                                  int stage, int warpgroup, bool accumulate) {
    const Operands from = operands(cta, stage, warpgroup);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) {
      step<kShape.halves(), kColumns>(acc, from, k, accumulate || k != 0);
    }
    ptx::wgmma_commit();
  }

  /// What k tile `kt` has of rows, columns and depth; none of the first: the stage is passed on.
  static __device__ __forceinline__ void multiply_some(Accumulator& acc, const Cta<kShape>& cta,
                                                       int stage, const Part& part, int kt) {
    int depth = kDepth;
    if constexpr (!Gemm::Scheduler::kFixedDepth) {
      depth = min(kDepth, part.depth - kt * kDepth);
      if (depth < kDepth) clear_tail(cta, stage, depth);
    }
    if (part.halves == 0) return;
    if constexpr (Gemm::Producer::kNeedsProxyFence) ptx::fence_async_shared();
    // ptxas wants products, the fence before them and the commit after them on one path.
    if (Gemm::kNarrows && part.columns <= 64 && depth == kDepth) {
      multiply<64>(acc, cta, stage, part.warpgroup, kt != 0);
    } else if (Gemm::kNarrows && kShape.n > 128 && part.columns <= 128 && depth == kDepth) {
      multiply<128>(acc, cta, stage, part.warpgroup, kt != 0);
    } else if constexpr (kShape.halves() > 1 || !Gemm::Scheduler::kFixedDepth) {
      const Operands from = operands(cta, stage, part.warpgroup);
#pragma unroll 1
      for (int k = 0; k * 16 < depth; k++) {
        ptx::wgmma_fence();
        step<1, kShape.n>(acc, from, k, kt != 0 || k != 0);
        ptx::wgmma_commit();
      }
    }
  }

  /// Of a stage, a warpgroup's rows of A and all of B.
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

  /// Sixteen of depth, the k-th of a stage.
  template <int kHalves, int kColumns>
  static __device__ __forceinline__ void step(Accumulator& acc, const Operands& from, int k,
                                              bool accumulate) {
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
      auto& part = reinterpret_cast<float(&)[kColumns / 2]>(acc[h]);
      ptx::Wgmma<typename Gemm::Element, kColumns, Gemm::kMajorA == Major::kMN,
                 Gemm::kMajorB == Major::kMN>::run(part,
                                                   from.a.at(k * k16_bytes(Gemm::kMajorA) +
                                                             h * kBoxBytes),
                                                   from.b.at(k * k16_bytes(Gemm::kMajorB)),
                                                   accumulate);
    }
  }
};

}  // namespace sonicmoe::cuda
