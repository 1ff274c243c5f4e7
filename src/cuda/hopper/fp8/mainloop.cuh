// The main loop of the FP8 kernels: computes the products of one tile. For each element of the tile
// the tensor cores sum the 128 products of codes of a k tile. The main loop multiplies this sum by
// the scale of the row and by the scale of the block of weights, and adds it to an fp32 register
// (promotion).
//
// A warpgroup multiplies a unit, waits until its products are complete, and promotes them. While
// one warpgroup promotes, the tensor cores work for the other. With a second set of accumulators
// one warpgroup could overlap its own products and promotion, but a wider tile uses the registers
// better.
#pragma once

#include "cuda/hopper/engine/mainloop.cuh"
#include "cuda/hopper/fp8/operand_a.cuh"
#include "cuda/hopper/fp8/scales.cuh"
#include "cuda/ptx/tma.cuh"
#include "wgmma_e4m3_generated.cuh"

namespace sonicmoe::cuda {

template <class Gemm>
struct Fp8Mainloop {
  static constexpr TileShape kShape = Gemm::kShape;
  static constexpr int kUnitSums = kFp8Block / 2;  // sums of a thread in a unit of 64 x 128
  using Sums = float[kFp8Units * kUnitSums];
  using Ring = RingPosition<kShape.stages>;

  /// Computes the sums of the current tile. The warpgroup waits for the next stage while the last
  /// products of a k tile run, which hides the latency of this wait.
  static __device__ __forceinline__ void run(Sums& sums, const typename Gemm::Params& p,
                                             const Fp8Cta& cta, Ring& ring,
                                             const ConsumerTiles& tiles, int warpgroup) {
    const std::uint32_t first_row = first_scale(tiles.current(), warpgroup);
#pragma unroll
    for (int i = 0; i < kFp8Units * kUnitSums; i++) sums[i] = 0.0f;
    typename Gemm::Codes codes(warpgroup);
    cta.full(ring.stage).wait(ring.parity);
    codes.arrived();
    codes.load(cta, ring.stage);
    if (alternates(p) && warpgroup == 1) sync(NamedBarrier::kOffset, 2 * kWarpgroup);
#pragma unroll 1
    for (int kt = 0; kt < p.tiles.k_tiles; kt++) {
      float row[2];
      for_each_index<kFp8Units>([&]<int kUnit>(std::integral_constant<int, kUnit>) {
        constexpr bool kLast = kUnit == kFp8Units - 1;
        float products[kUnitSums];
        multiply<kUnit>(products, codes, cta, ring.stage);
        if constexpr (kUnit == 0) {
          const std::uint32_t at = row_scales(cta, ring.stage) + first_row;
          row[0] = ptx::load_float(at);
          row[1] = ptx::load_float(at + 8 * 4);
        }
        const float weight = ptx::load_float(weight_scales(cta, ring.stage) + kUnit * 4);
        const float first = row[0] * weight;
        const float second = row[1] * weight;
        if constexpr (kLast) {
          ring.next();
          if (kt + 1 < p.tiles.k_tiles) {
            cta.full(ring.stage).wait(ring.parity);
            codes.arrived();
          }
        }
        ptx::wgmma_wait<0>();
        if constexpr (kLast) {
          __syncwarp();  // all lanes have read their scales and codes of the stage
          release_stage(cta, ring.previous_stage());
          if (kt + 1 < p.tiles.k_tiles) codes.load(cta, ring.stage);
        } else if (kt == 0 && warpgroup == 0 && alternates(p)) {
          arrive(NamedBarrier::kOffset, 2 * kWarpgroup);
        }
        promote(&sums[kUnit * kUnitSums], products, first, second);
      });
    }
    add_low_rank(sums, p, cta, ring, warpgroup);
  }

  /// For a warpgroup without valid rows in the tile: waits for each stage of the tile and releases
  /// it. Both warpgroups must release a stage before the producer fills it again.
  static __device__ __forceinline__ void pass(const typename Gemm::Params& p, const Fp8Cta& cta,
                                              Ring& ring, int warpgroup) {
    if (alternates(p)) {
      if (warpgroup == 0) {
        arrive(NamedBarrier::kOffset, 2 * kWarpgroup);
      } else {
        sync(NamedBarrier::kOffset, 2 * kWarpgroup);
      }
    }
#pragma unroll 1
    for (int kt = 0; kt < p.tiles.k_tiles + p.tiles.low_rank_k_tiles; kt++, ring.next()) {
      cta.full(ring.stage).wait(ring.parity);
      release_stage(cta, ring.stage);
    }
  }

 private:
  /// Whether warpgroup 1 begins a tile only after warpgroup 0 has multiplied its first unit. From
  /// then on the tensor cores mostly work for one warpgroup while the other promotes. This is up to
  /// 5 % faster with gathered rows, but 1 to 2 % slower with rows in expert order (H200).
  ///
  /// The tile must have more k tiles than the pipeline has stages. Then warpgroup 0 cannot finish
  /// the tile before warpgroup 1 has passed the barrier and released a stage. In a shorter tile
  /// warpgroup 0 could arrive at the same barrier again, for its next tile.
  static __device__ __forceinline__ bool alternates(const typename Gemm::Params& p) {
    return Gemm::Producer::kGathers && p.tiles.k_tiles > kShape.stages;
  }

  /// The byte offset of the scale of this lane's first row among the row scales of a stage. The
  /// lane's second row is eight rows further.
  static __device__ __forceinline__ std::uint32_t first_scale(const CtaTile& tile, int warpgroup) {
    const int row = warpgroup * 64 + ((threadIdx.x >> 5) & 3) * 16 + ((threadIdx.x & 31) >> 2);
    return (Gemm::Producer::rows_before(tile) + row) * 4;
  }

  /// Adds the k tiles of a low-rank term. They hold elements, whose products need no scales. The
  /// products have registers of their own, as those of codes: the tensor cores' sums of a k tile
  /// are added to the tile's.
  static __device__ __forceinline__ void add_low_rank(Sums& sums, const typename Gemm::Params& p,
                                                      const Fp8Cta& cta, Ring& ring,
                                                      int warpgroup) {
#pragma unroll 1
    for (int kt = 0; kt < p.tiles.low_rank_k_tiles; kt++, ring.next()) {
      cta.full(ring.stage).wait(ring.parity);
      for_each_index<kFp8Units>([&]<int kUnit>(std::integral_constant<int, kUnit>) {
        float products[kUnitSums];
        multiply_elements<kUnit>(products, cta, ring.stage, warpgroup);
        ptx::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < kUnitSums; i++) sums[kUnit * kUnitSums + i] += products[i];
      });
      release_stage(cta, ring.stage);
    }
  }

  template <int kUnit>
  static __device__ __forceinline__ void multiply_elements(float (&products)[kUnitSums],
                                                           const Fp8Cta& cta, int stage,
                                                           int warpgroup) {
    using Product = ptx::Wgmma<__nv_bfloat16, kFp8Block, 0, 0>;
    const ptx::SwizzledOperand a(cta.a(stage) + warpgroup * 64 * 128, leading_bytes(Major::kK));
    const ptx::SwizzledOperand b(cta.b(stage) + kUnit * kFp8Block * 128, leading_bytes(Major::kK));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++)
      Product::run(products, a.at(k * 32), b.at(k * 32), k != 0);
    ptx::wgmma_commit();
  }

  template <int kUnit>
  static __device__ __forceinline__ void multiply(float (&products)[kUnitSums],
                                                  const typename Gemm::Codes& codes,
                                                  const Fp8Cta& cta, int stage) {
    const ptx::SwizzledOperand b(cta.b(stage) + kUnit * kFp8Block * 128, leading_bytes(Major::kK));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kFp8Steps; k++) {
      ptx::WgmmaE4M3<kFp8Block>::run(products, codes.step(cta, stage, k), b.at(k * 32), k != 0);
    }
    ptx::wgmma_commit();
  }

  static __device__ __forceinline__ void promote(float* sums, const float (&products)[kUnitSums],
                                                 float first, float second) {
#pragma unroll
    for (int i = 0; i < kUnitSums; i += 4) {
      sums[i] = fmaf(products[i], first, sums[i]);
      sums[i + 1] = fmaf(products[i + 1], first, sums[i + 1]);
      sums[i + 2] = fmaf(products[i + 2], second, sums[i + 2]);
      sums[i + 3] = fmaf(products[i + 3], second, sums[i + 3]);
    }
  }
};

}  // namespace sonicmoe::cuda
