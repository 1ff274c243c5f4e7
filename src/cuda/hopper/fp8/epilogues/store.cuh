// Epilogue of Y = r(acc + b2) and dX~ = r(acc): adds a bias, multiplies each row by a scale (both
// optional), rounds to bf16 and stores by TMA.
#pragma once

#include "cuda/hopper/epilogues/ragged.cuh"
#include "cuda/hopper/epilogues/rounding.cuh"
#include "cuda/hopper/fp8/epilogues/codes.cuh"

namespace sonicmoe::cuda {

struct Fp8Store {
  using Params = Fp8StoreParams;
  using Element = __nv_bfloat16;

  static __device__ __forceinline__ void init(const Fp8Cta&) {}
  static __device__ __forceinline__ void begin(const Params&, const ConsumerTiles&, const Fp8Cta&,
                                               const Fp8Staging&, Rows) {}

  static __device__ __forceinline__ void run(const Params& p, const float (&sums)[128],
                                             const ConsumerTiles& tiles, const Fp8Cta&,
                                             const Fp8Staging& staging, Rows rows) {
    const CtaTile tile = tiles.current();
    const bool scaled = p.row_scale != nullptr;
    if (p.bias.data != nullptr) {
      stage_bias(staging, p.bias, tile.expert, tile.column, p.width, {0, 1, kFp8Tile.n});
    }
    if (scaled) stage_row_scales(p, tile, staging, rows);
    staging.begin();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      Fragment block;
      if (scaled) {
        round_scaled_block<Element>(block, &sums[i * 32], staging, i * 64, 0);
      } else if (p.bias.data != nullptr) {
        round_block<Element, BiasUse::kStaged>(block, &sums[i * 32], staging, i * 64);
      } else {
        round_block<Element, BiasUse::kNone>(block, &sums[i * 32], staging, i * 64);
      }
      staging.write(i, block);
    }
    staging.publish();
    if (staging.elected()) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        store_ragged(p.out, staging.box(i), tile.column + i * 64, 0, tile, rows.offset);
      }
      staging.commit();
    }
  }

 private:
  static __device__ __forceinline__ void stage_row_scales(const Params& p, const CtaTile& tile,
                                                          const Fp8Staging& staging, Rows rows) {
    const int i = threadIdx.x & 127;
    if (i >= kFp8Tile.warpgroup_rows()) return;
    const int row = rows.offset + i;
    const std::int64_t at = (tile.row + row) * p.scale_stride;
    staging.set_scale(i, row < tile.valid_rows ? __ldg(p.row_scale + at) : 0.0f);
  }
};

}  // namespace sonicmoe::cuda
