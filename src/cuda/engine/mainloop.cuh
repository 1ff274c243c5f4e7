// The consumers' loop over K: wait for a stage, four k16 steps of wgmma, give back the stage
// before.
#pragma once

#include <utility>

#include "cuda/engine/pipeline.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "wgmma_generated.cuh"

namespace sonicmoe::cuda {

/// Bytes from one k16 step to the next inside a stage, and the descriptor's leading offset.
constexpr int k16_bytes(Major major) { return major == Major::kK ? 32 : 2048; }
constexpr int leading_bytes(Major major) { return major == Major::kK ? 16 : kBoxBytes; }

inline constexpr int kTailBarrier = 5;  // named barrier of both consumer warpgroups

/// How far a tile runs through K.
struct Span {
  int k_tiles;
  int depth;  ///< rows, where rows are K
};

/// What is multiplied beside other work, and after how many k tiles the next piece of that comes.
struct Beside {
  int warpgroup;
  int k_tiles;
  int every;
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

  /// Multiplies the first kHalves 64-row halves of this warpgroup's rows by the first kColumns
  /// columns; with no half valid the stages are only passed on. `beside` runs under the products of
  /// each k tile, `hand_over` once the last product has been issued.
  template <int kHalves, int kColumns, class Beside, class HandOver>
  static __device__ __forceinline__ void run(Accumulator& acc, const Cta<kShape>& cta, Ring& ring,
                                             int warpgroup, Span span, Beside beside,
                                             HandOver hand_over) {
    for (int kt = 0; kt < span.k_tiles; kt++, ring.next()) {
      cta.full(ring.stage).wait(ring.parity);
      int rows = kDepth;
      if constexpr (!Gemm::Scheduler::kFixedDepth) {
        rows = min(kDepth, span.depth - kt * kDepth);
        if (rows < kDepth) clear_tail(cta, ring.stage, rows);
      }
      if constexpr (kHalves == 0) {
        release_stage(cta, ring.stage);
      } else {
        if constexpr (Gemm::Producer::kNeedsProxyFence) ptx::fence_async_shared();
        steps<kHalves, kColumns>(acc, cta, ring.stage, warpgroup, rows, kt != 0);
        ptx::wgmma_wait<1>();
        if (kt > 0) release_stage(cta, ring.before());
        beside(kt);
      }
    }
    hand_over();
    if constexpr (kHalves > 0) {
      ptx::wgmma_wait<0>();
      release_stage(cta, ring.before());
    }
  }

  /// As run over all halves: piece(i) of other work is done while the products of k tile i *
  /// `every` run, which lies inside the tile for all of kPieces.
  template <int kPieces, class Piece, class Between, class HandOver>
  static __device__ __forceinline__ void run_beside(Accumulator& acc, const Cta<kShape>& cta,
                                                    Ring& ring, const Beside& at, Piece piece,
                                                    Between between, HandOver hand_over) {
    const auto multiply = [&](bool accumulate) {
      cta.full(ring.stage).wait(ring.parity);
      if constexpr (Gemm::Producer::kNeedsProxyFence) ptx::fence_async_shared();
      step<kShape.halves(), kShape.n, kDepth / 16>(acc, cta, ring.stage, at.warpgroup, accumulate);
      ptx::wgmma_wait<1>();
      if (accumulate) release_stage(cta, ring.before());
      ring.next();
    };
    for_each_index<kPieces>([&]<int kPiece>(std::integral_constant<int, kPiece> index) {
      multiply(kPiece != 0);
      piece(index);
      if constexpr (kPiece < kPieces - 1) {
        for (int i = 1; i < at.every; i++) multiply(true);
      }
    });
    between();
    for (int kt = (kPieces - 1) * at.every + 1; kt < at.k_tiles; kt++) multiply(true);
    hand_over();
    ptx::wgmma_wait<0>();
    release_stage(cta, ring.before());
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

  /// The steps that hold the first `rows` of a k tile.
  template <int kHalves, int kColumns>
  static __device__ __forceinline__ void steps(Accumulator& acc, const Cta<kShape>& cta, int stage,
                                               int warpgroup, int rows, bool accumulate) {
    if (Gemm::Scheduler::kFixedDepth || rows > 48) {
      step<kHalves, kColumns, 4>(acc, cta, stage, warpgroup, accumulate);
    } else if (rows > 32) {
      step<kHalves, kColumns, 3>(acc, cta, stage, warpgroup, accumulate);
    } else if (rows > 16) {
      step<kHalves, kColumns, 2>(acc, cta, stage, warpgroup, accumulate);
    } else {
      step<kHalves, kColumns, 1>(acc, cta, stage, warpgroup, accumulate);
    }
  }

  /// kSteps of sixteen.
  template <int kHalves, int kColumns, int kSteps>
  static __device__ __forceinline__ void step(Accumulator& acc, const Cta<kShape>& cta, int stage,
                                              int warpgroup, bool accumulate) {
    const int rows_before = kShape.ping_pong() ? 0 : warpgroup * kShape.warpgroup_rows();
    const std::uint32_t a = cta.a(stage) + rows_before * (kDepth * kElementBytes);
    const std::uint32_t b = cta.b(stage);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      const std::uint64_t b_part =
          ptx::swizzled_descriptor(b + k * k16_bytes(Gemm::kMajorB), leading_bytes(Gemm::kMajorB));
#pragma unroll
      for (int h = 0; h < kHalves; h++) {
        const std::uint64_t a_part = ptx::swizzled_descriptor(
            a + h * kBoxBytes + k * k16_bytes(Gemm::kMajorA), leading_bytes(Gemm::kMajorA));
        auto& part = reinterpret_cast<float(&)[kColumns / 2]>(acc[h]);
        ptx::Wgmma<typename Gemm::Element, kColumns, Gemm::kMajorA == Major::kMN,
                   Gemm::kMajorB == Major::kMN>::run(part, a_part, b_part, accumulate || k != 0);
      }
    }
    ptx::wgmma_commit();
  }
};

}  // namespace sonicmoe::cuda
