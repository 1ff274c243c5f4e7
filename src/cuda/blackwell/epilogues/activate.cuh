// Epilogue of the up projection: H = r(D + bias), A = r(act(H)).
//
// With split gate and up a half of D has 64 columns of gate, then the same 64 columns of up. So a
// lane has gate and up of a column, in tiles of 256 and of 128 rows.
#pragma once

#include "cuda/blackwell/epilogues/warp_tile.cuh"
#include "cuda/portable/epilogues/activation_words.cuh"
#include "cuda/portable/params.h"

namespace sonicmoe::cuda::blackwell {

template <class Element>
struct Activate {
  using Params = portable::ActivateParams;
  static constexpr bool kMayBeginAtOnce = false;

  static __device__ __forceinline__ void run(const Params& p, const WarpTile& tile) {
    if (p.act.layout == GateLayout::kConcatenated) {
      run_split(p, tile);
    } else if (p.act.layout == GateLayout::kInterleaved) {
      run_whole<true>(p, tile);
    } else {
      run_whole<false>(p, tile);
    }
  }

 private:
  static constexpr int kWords = kPiece / 2;

  static __device__ __forceinline__ Target target(const portable::RowsOut& out,
                                                  const WarpTile& tile, int column, int columns) {
    return {out.data + tile.row * out.row_bytes + column * kElementBytes, out.row_bytes, columns};
  }

  static __device__ __forceinline__ void run_split(const Params& p, const WarpTile& tile) {
    const int n = p.act.width;
#pragma unroll 1
    for (int i = 0; i < tile.halves * (kBoxColumns / kPiece); i++) {
      const int half = i / (kBoxColumns / kPiece);
      const int within = i % (kBoxColumns / kPiece) * kPiece;
      const int column = tile.column + (tile.first_half + half) * kBoxColumns + within;
      if (column >= n) break;
      std::uint32_t h[2][kWords];
#pragma unroll
      for (int part = 0; part < 2; part++) {
        float values[kPiece];
        tile.load(values, half * kTileColumns / 2 + part * kBoxColumns + within);
        if (p.bias[part].data != nullptr) {
          add_bias<Element>(values, p.bias[part], tile, column, n);
        }
        round_piece<Element>(h[part], values);
        if (p.h.data != nullptr) {
          store_rows<kPiece>(tile, target(p.h, tile, part * n + column, n - column), h[part]);
        }
      }
      portable::HiddenWords pieces[kWords / 4];
      set_words(pieces, h[0], h[1]);
      store_a<true>(p, tile, column, pieces);
    }
  }

  /// D's columns are H's. kPaired: gate and up alternate.
  template <bool kPaired>
  static __device__ __forceinline__ void run_whole(const Params& p, const WarpTile& tile) {
    const int width = kPaired ? 2 * p.act.width : p.act.width;  // of H
    const int first = tile.column + tile.first_half * tile.half_columns;
#pragma unroll 1
    for (int c = 0; c < tile.halves * tile.half_columns; c += kPiece) {
      const int column = first + c;
      if (column >= width) break;
      float values[kPiece];
      tile.load(values, c);
      if (p.bias[0].data != nullptr) {
        if constexpr (kPaired) {
          add_bias<Element, 2>(values, p.bias[0], tile, column / 2, p.act.width);
          add_bias<Element, 2>(values + 1, p.bias[1], tile, column / 2, p.act.width);
        } else {
          add_bias<Element>(values, p.bias[0], tile, column, width);
        }
      }
      std::uint32_t h[kWords];
      round_piece<Element>(h, values);
      if (p.h.data != nullptr) {
        store_rows<kPiece>(tile, target(p.h, tile, column, width - column), h);
      }
      portable::HiddenWords pieces[kPaired ? kWords / 8 : kWords / 4];
      if constexpr (kPaired) {
#pragma unroll
        for (int i = 0; i < kWords / 8; i++) {
#pragma unroll
          for (int j = 0; j < 4; j++) {
            pieces[i].gate[j] = h[8 * i + 2 * j];
            pieces[i].up[j] = h[8 * i + 2 * j + 1];
          }
          pieces[i].exchange();
        }
      } else {
        set_words(pieces, h, h);
      }
      store_a<kPaired>(p, tile, kPaired ? column / 2 : column, pieces);
    }
  }

  static __device__ __forceinline__ void set_words(portable::HiddenWords (&pieces)[kWords / 4],
                                                   const std::uint32_t (&gate)[kWords],
                                                   const std::uint32_t (&up)[kWords]) {
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      pieces[i / 4].gate[i % 4] = gate[i];
      pieces[i / 4].up[i % 4] = up[i];
    }
  }

  /// Stores A of columns `column` and on.
  template <bool kGated, int kPieces>
  static __device__ __forceinline__ void store_a(const Params& p, const WarpTile& tile, int column,
                                                 const portable::HiddenWords (&pieces)[kPieces]) {
    std::uint32_t a[kPieces][4];
    portable::AnyKind::activate<Element, kGated>(p.act, pieces, a);
    store_rows<kPieces * 8>(tile, target(p.a, tile, column, p.act.width - column), &a[0][0]);
  }
};

}  // namespace sonicmoe::cuda::blackwell
