// Epilogue of dH. The accumulator D is dA' = dO W2. Computes dH = r(act'(H) s dA'), A' = r(s
// act(H)), and the part of dS over 64 columns.
#pragma once

#include "cuda/portable/engine/architecture.cuh"
#include "cuda/portable/epilogues/hidden_rows.cuh"
#include "cuda/portable/epilogues/staging.cuh"
#include "cuda/portable/params.h"
#include "cuda/portable/ptx/prefetch.cuh"

namespace sonicmoe::cuda::portable {

template <class Element, Width kWidth>
struct ActivateGrad {
  using Params = ActivateGradParams;
  static constexpr Columns kColumns = Columns::kNeighbours;
  static constexpr ColumnOrder kColumnOrder = ColumnOrder::kAscending;

  static __device__ __forceinline__ void run(const Params& p, const Accumulators& acc,
                                             const TileSlot& tile, const Warp& warp,
                                             std::uint32_t staging) {
    const Place place(p, tile, warp);
    SliceInputs inputs{};
    // If kAhead is 1, the first iteration only reads the inputs of slice 0. If these were read
    // before the loop, ptxas would make every iteration wait for the loads that it has just issued.
#pragma unroll 1
    for (int slice = -kAhead; slice < kSlices; slice++) {
      SliceInputs coming;
      place.read(p, (slice + kAhead) * kSliceRows, coming);
      if constexpr (kAhead == 0) inputs = coming;
      if (slice >= 0) run_slice(p, acc, place, warp, slice, staging, inputs);
      if constexpr (kAhead == 1) inputs = coming;
    }
  }

  /// Prefetches H of the tile to L2, so that it arrives while the products run. Otherwise the
  /// epilogues of all CTAs would read H from memory at the same time and wait for its bandwidth.
  static __device__ __forceinline__ void prepare(const Params& p, const TileSlot& tile) {
    constexpr int kColumns = static_cast<int>(kWidth);
    constexpr int kThreadsEach = kColumns / 128;  // threads of the CTA for each row
    const int row = threadIdx.x / kThreadsEach;
    if (row >= tile.rows) return;
    const int gates = p.act.layout == GateLayout::kNone ? 1 : 2;
    const int from = tile.column * (p.act.layout == GateLayout::kInterleaved ? 2 : 1);
    const int columns = kColumns * gates;
    const std::uint8_t* at = p.h + (std::int64_t{tile.row} + row) * p.h_row_bytes;
    for (int i = threadIdx.x % kThreadsEach * kLine; i < columns; i += kThreadsEach * kLine) {
      int column = from + i;
      if (p.act.layout == GateLayout::kConcatenated && i >= kColumns)
        column += p.act.width - kColumns;
      if (column < p.act.width * gates) ptx::prefetch_l2(at + column * kElementBytes);
    }
  }

 private:
  /// Elements in a line of L2.
  static constexpr int kLine = 128 / kElementBytes;
  /// Rows that the staging buffer holds, and rows that a warp processes at once, with eight lanes
  /// for the 64 columns of a row.
  static constexpr int kSliceRows = 8;
  static constexpr int kLaneRows = 4;
  /// Pieces of eight columns, one in each of its rows of a slice, that a lane processes.
  static constexpr int kPieces = kSliceRows / kLaneRows;
  static constexpr int kSlices = kWarpRows / kSliceRows;
  /// How many slices before their use a lane reads its inputs. 1 makes dH 1 to 7 % faster than 0
  /// (H100, hot). In code for 10.x it would spill 60 bytes of registers, in code for 12.x 80.
  static constexpr int kAhead = kArchitecture < 100 ? 1 : 0;
  /// Whether a row's weight is read ahead with its H, and whether the parts of dS of a lane's two
  /// rows are summed together. This makes dH 2 to 11 % faster (H100, hot). In code for 10.x it
  /// would spill 16 to 96 bytes of registers.
  static constexpr bool kTogether = kArchitecture < 100;

  /// What a lane reads for a piece.
  struct Inputs {
    HiddenQuads h;
    float weight;  ///< of the row; unused unless kTogether
  };
  struct SliceInputs {
    Inputs piece[kPieces];
  };

  /// The rows and columns of a lane.
  struct Place {
    std::int64_t row;  ///< first row, in expert order
    int rows;          ///< rows of the warp that exist from there on; 0 if the columns do not exist
    int column;        ///< first column, of A

    __device__ __forceinline__ Place(const Params& p, const TileSlot& tile, const Warp& warp) {
      const int within = warp.row * kWarpRows + (warp.lane >> 3);
      row = std::int64_t{tile.row} + within;
      column = tile.column + chunk_column<kColumns>(warp, warp.lane & 7);
      rows = min(kWarpRows, tile.rows - warp.row * kWarpRows) - (warp.lane >> 3);
      if (column >= p.act.width) rows = 0;
    }
    __device__ __forceinline__ bool exists(int offset) const { return offset < rows; }

    /// The inputs of the piece `offset` rows further.
    __device__ __forceinline__ Inputs inputs(const Params& p, int offset) const {
      if (!exists(offset)) return {};
      return {read_hidden(p.act, p.h + (row + offset) * p.h_row_bytes, column),
              kTogether ? weight(p, offset) : 0.0f};
    }
    /// Starts the loads of the slice whose first row is `offset` rows further.
    __device__ __forceinline__ void read(const Params& p, int offset, SliceInputs& to) const {
#pragma unroll
      for (int i = 0; i < kPieces; i++) to.piece[i] = inputs(p, offset + i * kLaneRows);
    }
    __device__ __forceinline__ float weight(const Params& p, int offset) const {
      return p.row_weight != nullptr ? p.row_weight[row + offset] : 1.0f;
    }
  };

  static __device__ __forceinline__ void run_slice(const Params& p, const Accumulators& acc,
                                                   const Place& place, const Warp& warp, int slice,
                                                   std::uint32_t staging,
                                                   const SliceInputs& inputs) {
    write_slice(staging, warp, acc, slice);
    __syncwarp();
    float scores[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const int offset = slice * kSliceRows + i * kLaneRows;
      const std::uint32_t row = staging + i * kLaneRows * kFloatsRowBytes;
      scores[i] = differentiate_piece(p, place, offset, inputs.piece[i], row);
      if constexpr (!kTogether) store_score(p, place, offset, scores[i]);
    }
    if constexpr (kTogether) store_scores(p, place, slice * kSliceRows, scores);
    __syncwarp();
  }

  /// Computes and stores the piece `offset` rows after the lane's first row. Returns its part of
  /// dS, 0 if it does not exist.
  static __device__ __forceinline__ float differentiate_piece(const Params& p, const Place& place,
                                                              int offset, const Inputs& inputs,
                                                              std::uint32_t staged) {
    const bool interleaved = p.act.layout == GateLayout::kInterleaved;
    const bool exists = place.exists(offset);
    const std::int64_t row = place.row + offset;
    const int lane = threadIdx.x & 31;
    HiddenWords h = words_of(p.act, inputs.h);
    GradPiece piece;
    if constexpr (kTogether) {
      piece.weight = inputs.weight;
    } else {
      piece.weight = exists ? place.weight(p, offset) : 1.0f;
    }
    read_floats(piece.grad, staged, lane >> 3, lane & 7);
    if (interleaved) h.exchange();
    differentiate<Element>(p.act, h, piece);
    if (interleaved) h.exchange();
    if (!exists) return 0.0f;
    *reinterpret_cast<uint4*>(p.a.data + row * p.a.row_bytes + place.column * kElementBytes) =
        quad_of(piece.a);
    store_hidden(p.act, h, p.dh + row * p.h_row_bytes, place.column);
    return piece.score;
  }

  // Both sums over the eight lanes of a row have the same fixed order: equal inputs give equal
  // bits.

  /// Sums and stores the part of dS of one row.
  static __device__ __forceinline__ void store_score(const Params& p, const Place& place,
                                                     int offset, float score) {
#pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) score += __shfl_xor_sync(~0u, score, apart);
    if ((threadIdx.x & 7) == 0 && place.exists(offset)) write_score(p, place, offset, score);
  }

  /// Sums and stores the parts of dS of a lane's two rows. Even lanes sum the first row, odd lanes
  /// the second, so three shuffles serve both rows.
  static __device__ __forceinline__ void store_scores(const Params& p, const Place& place,
                                                      int offset, const float (&scores)[kPieces]) {
    static_assert(kPieces == 2);
    const bool second = (threadIdx.x & 1) != 0;
    const float other = __shfl_xor_sync(~0u, second ? scores[0] : scores[1], 1);
    float score = (second ? scores[1] : scores[0]) + other;
#pragma unroll
    for (int apart = 2; apart < 8; apart *= 2) score += __shfl_xor_sync(~0u, score, apart);
    // The first of the eight lanes has columns in the matrix if any of the eight has.
    const int rows = __shfl_sync(~0u, place.rows, threadIdx.x & 24);
    offset += second ? kLaneRows : 0;
    if ((threadIdx.x & 7) < 2 && offset < rows) write_score(p, place, offset, score);
  }

  static __device__ __forceinline__ void write_score(const Params& p, const Place& place,
                                                     int offset, float score) {
    p.score_parts[(place.row + offset) * p.score_tiles + place.column / kWarpColumns] = score;
  }
};

}  // namespace sonicmoe::cuda::portable
