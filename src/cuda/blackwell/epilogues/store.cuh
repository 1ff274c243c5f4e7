// Epilogue that stores rows: out = r(scale * (D + bias)).
#pragma once

#include "cuda/blackwell/epilogues/warp_tile.cuh"
#include "cuda/portable/params.h"

namespace sonicmoe::cuda::blackwell {

template <class Element>
struct Store {
  using Params = portable::StoreParams;
  static constexpr bool kMayBeginAtOnce = true;

  static __device__ __forceinline__ void run(const Params& p, const WarpTile& tile) {
    const float scale = scale_of(p, tile);
    const int columns = tile.halves * tile.half_columns;
    const int first = tile.column + tile.first_half * tile.half_columns;
#pragma unroll 1
    for (int c = 0; c < columns; c += kPiece) {
      const int column = first + c;
      if (column >= p.columns) break;
      float values[kPiece];
      tile.load(values, c);
      if (p.bias.data != nullptr) {
        add_bias<Element>(values, p.bias, tile, column, p.columns);
      }
#pragma unroll
      for (int i = 0; i < kPiece; i++) values[i] *= scale;
      std::uint32_t words[kPiece / 2];
      round_piece<Element>(words, values);
      store_rows<kPiece>(tile,
                         {p.out.data + tile.row * p.out.row_bytes + column * kElementBytes,
                          p.out.row_bytes, p.columns - column},
                         words);
    }
  }

 private:
  /// Of the lane's row.
  static __device__ __forceinline__ float scale_of(const Params& p, const WarpTile& tile) {
    if (p.row_scale == nullptr || tile.lane >= tile.rows) return p.factor;
    return p.factor * __ldg(p.row_scale + (tile.row + tile.lane) * p.scale_stride);
  }
};

}  // namespace sonicmoe::cuda::blackwell
