// Epilogue of the up-projection: H = r(D + bias), A = r(act(H)), for K-major weights.
//
// The warp has 32 columns of each half of the tile (Columns::kHalves). In each of its rows a lane
// holds one chunk of eight columns of each half (ColumnOrder::kByLane). It activates and stores
// them without other lanes:
//
//   | gates | chunk of the first half | chunk of the second half | columns of A |
//   | split | gate                    | up                       | 8            |
//   | none  | 8 of H                  | 8 of H                   | 8 and 8      |
//
// GateLayout::kInterleaved does not occur: gate and up alternate only along the contiguous
// dimension of the weights (layer/views.cc), which is K here.
#pragma once

#include "cuda/math/fragment.cuh"
#include "cuda/portable/engine/architecture.cuh"
#include "cuda/portable/epilogues/activate_staged.cuh"

namespace sonicmoe::cuda::portable {

template <class Element>
struct Activate {
  using Params = ActivateParams;
  static constexpr Columns kColumns = Columns::kHalves;
  /// In code for 10.x and 12.x kByLane would spill more than 1 KB of registers.
  static constexpr ColumnOrder kColumnOrder =
      kArchitecture < 100 ? ColumnOrder::kByLane : ColumnOrder::kAscending;

  static __device__ __forceinline__ void run(const Params& p, const Accumulators& acc,
                                             const TileSlot& tile, const Warp& warp,
                                             std::uint32_t staging) {
    if constexpr (kColumnOrder == ColumnOrder::kAscending) {
      ActivateStaged<Element>::run(p, acc, tile, warp, staging);
    } else if (p.act.layout == GateLayout::kConcatenated && p.act.kind == ActivationKind::kSwiGLU) {
      store<GateLayout::kConcatenated, OneKind<ActivationKind::kSwiGLU>>(p, acc, tile, warp);
    } else if (p.act.layout == GateLayout::kConcatenated) {
      store<GateLayout::kConcatenated, AnyKind>(p, acc, tile, warp);
    } else {
      store<GateLayout::kNone, AnyKind>(p, acc, tile, warp);
    }
  }

 private:
  /// Pieces of eight columns of A that a lane has in a row.
  template <GateLayout kLayout>
  static constexpr int kPieces = kLayout == GateLayout::kNone ? 2 : 1;
  /// Rows that a lane activates at once. They have two pieces; four would spill registers.
  template <GateLayout kLayout>
  static constexpr int kAtOnce = 2 / kPieces<kLayout>;

  /// Where a lane's chunks are in memory, in its first row of a part of 16 rows. Its second row is
  /// eight rows further.
  template <GateLayout kLayout>
  struct Place {
    int rows;        ///< rows of the expert from this row on
    bool exists[2];  ///< of each chunk: whether its columns exist
    std::uint8_t* h;
    std::uint8_t* a;
    std::int64_t second_h;  ///< bytes from the first chunk of H to the second

    __device__ __forceinline__ Place(const Params& p, const TileSlot& tile, const Warp& warp) {
      const int row = warp.row * kWarpRows + (warp.lane >> 2);
      const int column = tile.column + chunk_column<kColumns>(warp, warp.lane & 3);
      rows = tile.rows - row;
      exists[0] = column < p.act.width;
      exists[1] =
          kLayout == GateLayout::kConcatenated ? exists[0] : column + kHalfColumns < p.act.width;
      const std::int64_t at = std::int64_t{tile.row} + row;
      h = p.h.data + at * p.h.row_bytes + column * kElementBytes;
      a = p.a.data + at * p.a.row_bytes + column * kElementBytes;
      second_h =
          (kLayout == GateLayout::kConcatenated ? p.act.width : kHalfColumns) * kElementBytes;
    }
    /// Moves on to the next part.
    __device__ __forceinline__ void next(const Params& p) {
      rows -= 16;
      h += 16 * p.h.row_bytes;
      a += 16 * p.a.row_bytes;
    }

    __device__ __forceinline__ void store_h(const Params& p, const Fragment& words, int row) const {
      if (8 * row >= rows) return;
      std::uint8_t* to = h + 8 * row * p.h.row_bytes;
      if (exists[0]) *reinterpret_cast<uint4*>(to) = chunk_of(words, row, 0);
      if (exists[1]) *reinterpret_cast<uint4*>(to + second_h) = chunk_of(words, row, 1);
    }
    __device__ __forceinline__ void store_a(const Params& p, const std::uint32_t (*pieces)[4],
                                            int row) const {
      if (8 * row >= rows) return;
      std::uint8_t* to = a + 8 * row * p.a.row_bytes;
      if (exists[0]) *reinterpret_cast<uint4*>(to) = quad_of(pieces[0]);
      if constexpr (kLayout == GateLayout::kNone) {
        if (exists[1]) {
          *reinterpret_cast<uint4*>(to + kHalfColumns * kElementBytes) = quad_of(pieces[1]);
        }
      }
    }
  };

  template <GateLayout kLayout, class Kinds>
  static __device__ __forceinline__ void store(const Params& p, const Accumulators& acc,
                                               const TileSlot& tile, const Warp& warp) {
    Place<kLayout> place(p, tile, warp);
#pragma unroll 1
    for (int part = 0; part < 4; part++, place.next(p)) {
      Fragment words;
      with_part(acc, part,
                [&](const float(&values)[8][4]) { round<kLayout>(p, values, tile, warp, words); });
      if (p.h.data != nullptr) {
        place.store_h(p, words, 0);
        place.store_h(p, words, 1);
      }
#pragma unroll
      for (int row = 0; row < 2; row += kAtOnce<kLayout>) {
        store_rows<kLayout, Kinds>(p, words, row, place);
      }
    }
  }

  /// Rounds the lane's two rows of H.
  template <GateLayout kLayout>
  static __device__ __forceinline__ void round(const Params& p, const float (&values)[8][4],
                                               const TileSlot& tile, const Warp& warp,
                                               Fragment& words) {
    if (p.bias[0].data == nullptr) {
#pragma unroll
      for (int j = 0; j < 8; j++) round_words<Element>(&words[2 * j], values[j]);
      return;
    }
    const int chunk = warp.lane & 3;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int within = chunk_column<kColumns>(warp, j / 4 * 4 + chunk) + j % 4 * 2;
      round_words<Element>(&words[2 * j], values[j], hidden_bias<kLayout>(p, tile, within, j / 4));
    }
  }

  /// Row 0 or 1 of a lane's words, its chunk of one half of the tile.
  static __device__ __forceinline__ uint4 chunk_of(const Fragment& words, int row, int half) {
    const std::uint32_t* first = &words[8 * half + row];
    return {first[0], first[2], first[4], first[6]};
  }

  /// Activates and stores kAtOnce rows of a lane's words, from `row` on.
  template <GateLayout kLayout, class Kinds>
  static __device__ __forceinline__ void store_rows(const Params& p, const Fragment& words, int row,
                                                    const Place<kLayout>& place) {
    HiddenWords hidden[2];
    std::uint32_t activated[2][4];
#pragma unroll
    for (int i = 0; i < kAtOnce<kLayout>; i++) {
      load_pieces<kLayout>(&hidden[i * kPieces<kLayout>], words, row + i);
    }
    Kinds::template activate<Element, kLayout != GateLayout::kNone>(p.act, hidden, activated);
#pragma unroll
    for (int i = 0; i < kAtOnce<kLayout>; i++) {
      place.store_a(p, &activated[i * kPieces<kLayout>], row + i);
    }
  }

  template <GateLayout kLayout>
  static __device__ __forceinline__ void load_pieces(HiddenWords* pieces, const Fragment& words,
                                                     int row) {
    const uint4 first = chunk_of(words, row, 0);
    const uint4 second = chunk_of(words, row, 1);
    pieces[0].set_gates(first);
    if constexpr (kLayout == GateLayout::kConcatenated) {
      pieces[0].set_ups(second);
    } else {
      pieces[1].set_gates(second);
    }
  }
};

}  // namespace sonicmoe::cuda::portable
