// The epilogue of activate.cuh where a lane does not hold whole chunks of eight columns. Results
// pass through the staging buffer.
//
// The warp's 64 columns of D are 8 chunks of 8 columns. Chunks 0 to 3 are in the first half of the
// tile, 4 to 7 in the second (Columns::kHalves). A lane processes pieces of 8 columns of A:
//
//   | gates       | chunks of H for piece i        | columns of A in a warp | pieces in a row |
//   | split       | i (gate) and 4 + i (up)        | 32                     | 4               |
//   | interleaved | 2i and 2i + 1                  | 32                     | 4               |
//   | none        | i                              | 64                     | 8               |
#pragma once

#include "cuda/portable/engine/architecture.cuh"
#include "cuda/portable/epilogues/bias.cuh"
#include "cuda/portable/epilogues/hidden_rows.cuh"
#include "cuda/portable/epilogues/staging.cuh"

namespace sonicmoe::cuda::portable {

template <class Element>
struct ActivateStaged {
  using Params = ActivateParams;
  static constexpr Columns kColumns = Columns::kHalves;
  static constexpr ColumnOrder kColumnOrder = ColumnOrder::kAscending;

  static __device__ __forceinline__ void run(const Params& p, const Accumulators& acc,
                                             const TileSlot& tile, const Warp& warp,
                                             std::uint32_t staging) {
    switch (p.act.layout) {
      case GateLayout::kNone:
        return store<GateLayout::kNone>(p, acc, tile, warp, staging);
      case GateLayout::kConcatenated:
        return store<GateLayout::kConcatenated>(p, acc, tile, warp, staging);
      case GateLayout::kInterleaved:
        return store<GateLayout::kInterleaved>(p, acc, tile, warp, staging);
    }
  }

 private:
  /// Pieces that a lane activates at once. Two pieces would spill registers in code for 10.x.
  static constexpr int kAtOnce = kArchitecture >= 100 && kArchitecture < 120 ? 1 : 2;

  template <GateLayout kLayout>
  static __device__ __forceinline__ void store(const Params& p, const Accumulators& acc,
                                               const TileSlot& tile, const Warp& warp,
                                               std::uint32_t staging) {
    constexpr int kPieces = kLayout == GateLayout::kNone ? kChunks : kChunks / 2;
    constexpr int kRows = 32 / kPieces;  // rows that the warp's lanes process at once
    const int piece = warp.lane % kPieces;
    const int row = warp.lane / kPieces;
    const int chunk =
        chunk_column<kColumns>(warp, kLayout == GateLayout::kInterleaved ? 2 * piece : piece);
    const int column =
        kLayout == GateLayout::kInterleaved ? (tile.column + chunk) / 2 : tile.column + chunk;
    int first = tile.row + warp.row * kWarpRows + row;
    int rows = column < p.act.width ? tile.rows - warp.row * kWarpRows - row : 0;
    const std::uint32_t staged = staging + row * kWordsRowBytes;
#pragma unroll 1
    for (int part = 0; part < 4; part++, first += 16, rows -= 16) {
      with_part(acc, part, [&](const float(&values)[8][4]) {
        write<kLayout>(p, values, tile, warp, staging);
      });
      __syncwarp();
#pragma unroll 1
      for (int at = 0; at < 16; at += kAtOnce * kRows) {
        HiddenWords words[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
          words[i] = read_staged<kLayout>(staged + (at + i * kRows) * kWordsRowBytes, piece);
          if (p.h.data != nullptr && at + i * kRows < rows) {
            store_hidden(p.act, words[i], row_of(p.h, first + at + i * kRows), column);
          }
          if constexpr (kLayout == GateLayout::kInterleaved) words[i].exchange();
        }
        std::uint32_t activated[kAtOnce][4];
        AnyKind::activate<Element, kLayout != GateLayout::kNone>(p.act, words, activated);
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
          if (at + i * kRows < rows) {
            std::uint8_t* to = row_of(p.a, first + at + i * kRows) + column * kElementBytes;
            *reinterpret_cast<uint4*>(to) = quad_of(activated[i]);
          }
        }
      }
      __syncwarp();
    }
  }

  static __device__ __forceinline__ std::uint8_t* row_of(const RowsOut& out, int row) {
    return out.data + row * out.row_bytes;
  }

  /// Rounds 16 rows of H and writes them to the staging buffer.
  template <GateLayout kLayout>
  static __device__ __forceinline__ void write(const Params& p, const float (&values)[8][4],
                                               const TileSlot& tile, const Warp& warp,
                                               std::uint32_t staging) {
    const std::uint32_t at = word_address(staging, warp);
    const bool biased = p.bias[0].data != nullptr;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      std::uint32_t words[2];
      if (biased) {
        const int within = chunk_column<kColumns>(warp, j) + (warp.lane & 3) * 2;
        round_words<Element>(words, values[j], hidden_bias<kLayout>(p, tile, within, j / 4));
      } else {
        round_words<Element>(words, values[j]);
      }
      write_words(at, j, words);
    }
  }

  /// Reads a piece of a row from the staging buffer, in the layout of H.
  template <GateLayout kLayout>
  static __device__ __forceinline__ HiddenWords read_staged(std::uint32_t row, int piece) {
    HiddenWords h{};
    if constexpr (kLayout == GateLayout::kInterleaved) {
      h.set_quad(0, ptx::load_shared16(row + piece * 32));
      h.set_quad(1, ptx::load_shared16(row + piece * 32 + 16));
      return h;
    }
    h.set_gates(ptx::load_shared16(row + piece * 16));
    if constexpr (kLayout == GateLayout::kConcatenated)
      h.set_ups(ptx::load_shared16(row + (piece + 4) * 16));
    return h;
  }
};

}  // namespace sonicmoe::cuda::portable
