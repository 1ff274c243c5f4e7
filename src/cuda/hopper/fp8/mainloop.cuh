// The products of one tile. For each element of the tile the tensor cores sum the 128 products of
// codes of a k tile. This sum is multiplied by the scale of its row and the scale of its block of
// weights, and added to an fp32 register (promotion).
//
// A warpgroup multiplies a unit, waits for it, and promotes it. Meanwhile the tensor cores work for
// the other warpgroup. With a second set of accumulators a warpgroup could overlap its own products
// and promotion, but a wider tile is a better use of the registers.
#pragma once

#include "cuda/hopper/engine/mainloop.cuh"
#include "cuda/hopper/fp8/scales.cuh"
#include "cuda/hopper/ptx/tma.cuh"
#include "wgmma_e4m3_generated.cuh"

namespace sonicmoe::cuda {

template <class Gemm>
struct Fp8Mainloop {
  static constexpr TileShape kShape = Gemm::kShape;
  static constexpr int kUnitSums = kFp8Block / 2;  // of a thread in a unit of 64 x 128
  using Sums = float[kFp8Units * kUnitSums];
  using Ring = RingPosition<kShape.stages>;

  /// Multiplies the current tile. Its first scales of weights must be in shared memory.
  static __device__ __forceinline__ void run(Sums& sums, const typename Gemm::Params& p,
                                             const Fp8Cta& cta, Ring& ring,
                                             const ConsumerTiles& tiles, int warpgroup) {
    const std::uint32_t first_row = first_scale(tiles.current(), warpgroup);
#pragma unroll
    for (int i = 0; i < kFp8Units * kUnitSums; i++) sums[i] = 0.0f;
    const TileWeightScales scales(tiles);
#pragma unroll 1
    for (int kt = 0; kt < p.tiles.k_tiles; kt++, ring.next()) {
      cta.full(ring.stage).wait(ring.parity);
      if constexpr (Gemm::Producer::kNeedsProxyFence) ptx::fence_async_shared();
      float row[2];
      for_each_index<kFp8Units>([&]<int kUnit>(std::integral_constant<int, kUnit>) {
        float products[kUnitSums];
        multiply<kUnit>(products, cta, ring.stage, warpgroup);
        if constexpr (kUnit == 0) {
          const std::uint32_t at = row_scales(cta, ring.stage) + first_row;
          row[0] = ptx::load_float(at);
          row[1] = ptx::load_float(at + 8 * 4);
        }
        const float weight = scales.at(kUnit, kt);
        const float first = row[0] * weight;
        const float second = row[1] * weight;
        ptx::wgmma_wait<0>();
        if constexpr (kUnit == kFp8Units - 1) release_stage(cta, ring.stage);
        promote(&sums[kUnit * kUnitSums], products, first, second);
      });
      if ((kt + 1) % TileWeightScales::kTiles == 0 && kt + 1 < p.tiles.k_tiles) {
        __syncwarp();
        scales.load(p.weight_scales, tiles.current(), p.tiles.k_tiles, kt + 1);
        scales.wait();
      }
    }
  }

  /// For a warpgroup without rows in the tile: waits for the tile's stages and releases them.
  static __device__ __forceinline__ void pass(const typename Gemm::Params& p, const Fp8Cta& cta,
                                              Ring& ring) {
#pragma unroll 1
    for (int kt = 0; kt < p.tiles.k_tiles; kt++, ring.next()) {
      cta.full(ring.stage).wait(ring.parity);
      release_stage(cta, ring.stage);
    }
  }

 private:
  static constexpr int kSteps = 4;  // of 32 codes of K

  /// The offset of this lane's first row among the row scales of a stage.
  static __device__ __forceinline__ std::uint32_t first_scale(const CtaTile& tile, int warpgroup) {
    const int row = warpgroup * 64 + ((threadIdx.x >> 5) & 3) * 16 + ((threadIdx.x & 31) >> 2);
    return (Gemm::Producer::rows_before(tile) + row) * 4;
  }

  template <int kUnit>
  static __device__ __forceinline__ void multiply(float (&products)[kUnitSums], const Fp8Cta& cta,
                                                  int stage, int warpgroup) {
    const ptx::SwizzledOperand a(cta.a(stage) + warpgroup * 64 * 128, leading_bytes(Major::kK));
    const ptx::SwizzledOperand b(cta.b(stage) + kUnit * kFp8Block * 128, leading_bytes(Major::kK));
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      ptx::WgmmaE4M3<kFp8Block>::run(products, a.at(k * 32), b.at(k * 32), k != 0);
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
