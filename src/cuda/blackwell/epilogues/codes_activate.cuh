// Epilogue of the up projection of codes: H = r(D + bias), A = q(r(act(H))). Stores the codes of A,
// and H as codes, in bf16, or not at all.
//
// With a gate, D's columns are a block of gate, then the same block of up. Without one they are two
// blocks of H. In each 32 columns of D the words of H, then those of A replace the first 16.
#pragma once

#include "cuda/blackwell/epilogues/row_codes.cuh"
#include "cuda/portable/epilogues/activation_words.cuh"

namespace sonicmoe::cuda::blackwell {

struct CodesActivate {
  using Params = CodesActivateParams;
  using Element = __nv_bfloat16;
  static constexpr bool kMayBeginAtOnce = false;

  static __device__ __forceinline__ void run(const Params& p, const WarpTile& tile) {
    if (p.act.layout == GateLayout::kNone) {
#pragma unroll 1
      for (int unit = 0; unit < kTileColumns / kBlock; unit++) {
        const int column = tile.column + unit * kBlock;
        if (column >= p.act.width) break;
        const int d = unit * kBlock;
        round_hidden(p, tile, {0, column / kBlock}, d);
        store_a<false>(p, tile, column / kBlock, d);
      }
      return;
    }
    const int block = tile.column / kBlock;
#pragma unroll 1
    for (int part = 0; part < 2; part++) round_hidden(p, tile, {part, block}, part * kBlock);
    store_a<true>(p, tile, block, 0);
  }

 private:
  static constexpr int kWords = kPiece / 2;

  /// Reads the words that replace D's columns `d` and on.
  static __device__ __forceinline__ auto words_at(const WarpTile& tile, int d) {
    return [&tile, d](std::uint32_t(&words)[kWords], int piece) {
      tile.load_words(words, d + piece * kPiece);
    };
  }

  /// Computes H of a block, which is D's columns `d` and on, and stores it as it is kept.
  static __device__ __forceinline__ void round_hidden(const Params& p, const WarpTile& tile,
                                                      BlockOf at, int d) {
    const int n = p.act.width;
    const int left = n - at.block * kBlock;
    std::uint32_t most = 0;
#pragma unroll 1
    for (int c = 0; c < min(left, kBlock); c += kPiece) {
      const int column = at.block * kBlock + c;
      float values[kPiece];
      tile.load(values, d + c);
      if (p.bias[at.part].data != nullptr) {
        add_bias<Element>(values, p.bias[at.part], tile, column, n);
      }
      std::uint32_t h[kWords];
      round_piece<Element>(h, values);
      most = larger_of(most, h);
      if (p.h_elements.data != nullptr) {
        const portable::RowsOut& out = p.h_elements;
        store_rows<kPiece>(tile,
                           {out.data + tile.row * out.row_bytes +
                                (std::int64_t{at.part} * n + column) * kElementBytes,
                            out.row_bytes, left - c},
                           h);
      }
      tile.store_words(h, d + c);
    }
    if (p.h.codes != nullptr) store_codes(tile, p.h, at, most, left, words_at(tile, d));
  }

  /// Computes A of a block from the words of H, and stores it.
  template <bool kGated>
  static __device__ __forceinline__ void store_a(const Params& p, const WarpTile& tile, int block,
                                                 int d) {
    const int left = p.act.width - block * kBlock;
    std::uint32_t most = 0;
#pragma unroll 1
    for (int c = 0; c < min(left, kBlock); c += kPiece) {
      std::uint32_t gate[kWords], up[kWords];
      tile.load_words(gate, d + c);
      if constexpr (kGated) tile.load_words(up, kBlock + c);
      portable::HiddenWords pieces[kWords / 4];
#pragma unroll
      for (int i = 0; i < kWords; i++) {
        pieces[i / 4].gate[i % 4] = gate[i];
        pieces[i / 4].up[i % 4] = kGated ? up[i] : gate[i];
      }
      std::uint32_t a[kWords / 4][4];
      portable::AnyKind::activate<Element, kGated>(p.act, pieces, a);
#pragma unroll
      for (int i = 0; i < kWords; i++) gate[i] = a[i / 4][i % 4];
      most = larger_of(most, gate);
      tile.store_words(gate, d + c);
    }
    store_codes(tile, p.a, {0, block}, most, left, words_at(tile, d));
  }
};

}  // namespace sonicmoe::cuda::blackwell
