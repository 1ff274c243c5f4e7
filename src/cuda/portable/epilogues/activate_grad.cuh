// Epilogue of dH. The accumulator D is dA' = dO W2. Computes dH = r(act'(H) s dA'), A' = r(s
// act(H)), and the part of dS over 64 columns.
#pragma once

#include "cuda/portable/epilogues/hidden_rows.cuh"
#include "cuda/portable/epilogues/staging.cuh"
#include "cuda/portable/params.h"
#include "cuda/portable/ptx/prefetch.cuh"

namespace sonicmoe::cuda::portable {

template <class Element, Width kWidth>
struct ActivateGrad {
  using Params = ActivateGradParams;
  static constexpr Columns kColumns = Columns::kNeighbours;

  static __device__ __forceinline__ void run(const Params& p, const Accumulators& acc,
                                             const TileSlot& tile, const Warp& warp,
                                             std::uint32_t staging) {
    const Place place(p, tile, warp);
    HiddenWords ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) ahead[i] = place.hidden(p, i * kLaneRows);
#pragma unroll 1
    for (int slice = 0; slice < kWarpRows / kSliceRows; slice++) {
      write_slice(staging, warp, acc, slice);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kSliceRows / kLaneRows; i++) {
        HiddenWords h = ahead[i % kAhead];
        const int offset = slice * kSliceRows + i * kLaneRows;
        ahead[i % kAhead] = place.hidden(p, offset + kAhead * kLaneRows);
        const std::uint32_t row = staging + i * kLaneRows * kFloatsRowBytes;
        differentiate_piece(p, place, offset, h, row);
      }
      __syncwarp();
    }
  }

  /// Prefetches H of the tile to L2, so that it arrives while the products run. Otherwise the
  /// epilogues of all CTAs would read H from memory at the same time and wait for its bandwidth.
  static __device__ __forceinline__ void prepare(const Params& p, const TileSlot& tile) {
    constexpr int kColumns = static_cast<int>(kWidth);
    constexpr int kTogether = kColumns / 128;  // the CTA has as many threads for each row
    const int row = threadIdx.x / kTogether;
    if (row >= tile.rows) return;
    const int gates = p.act.gates == Gates::kNone ? 1 : 2;
    const int from = tile.column * (p.act.gates == Gates::kInterleaved ? 2 : 1);
    const int columns = kColumns * gates;
    const std::uint8_t* at = p.h + (std::int64_t{tile.row} + row) * p.h_row_bytes;
    for (int i = threadIdx.x % kTogether * kLine; i < columns; i += kTogether * kLine) {
      int column = from + i;
      if (p.act.gates == Gates::kSplit && i >= kColumns) column += p.act.width - kColumns;
      if (column < p.act.width * gates) ptx::prefetch_l2(at + column * kElementBytes);
    }
  }

 private:
  /// Elements in a line of L2.
  static constexpr int kLine = 128 / kElementBytes;
  /// Rows that the staging buffer holds, and rows that the warp's lanes process at once: eight
  /// lanes share the 64 columns of a row.
  static constexpr int kSliceRows = 8;
  static constexpr int kLaneRows = 4;
  /// Pieces of H that a lane reads ahead. Processing two pieces takes about as long as the latency
  /// of memory. In code for 12.0 two pieces would spill registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr int kAhead = 1;
#else
  static constexpr int kAhead = 2;
#endif

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

    /// H of the lane's columns, `offset` rows further.
    __device__ __forceinline__ HiddenWords hidden(const Params& p, int offset) const {
      if (!exists(offset)) return {};
      return read_hidden(p.act, p.h + (row + offset) * p.h_row_bytes, column);
    }
  };

  /// Computes and stores eight columns of one row, `offset` rows after the lane's first row.
  static __device__ __forceinline__ void differentiate_piece(const Params& p, const Place& place,
                                                             int offset, HiddenWords& h,
                                                             std::uint32_t staged) {
    const bool interleaved = p.act.gates == Gates::kInterleaved;
    const bool exists = place.exists(offset);
    const std::int64_t row = place.row + offset;
    const int lane = threadIdx.x & 31;
    GradPiece piece;
    piece.weight = exists && p.row_weight != nullptr ? p.row_weight[row] : 1.0f;
    read_floats(piece.grad, staged, lane >> 3, lane & 7);
    if (interleaved) h.exchange();
    differentiate<Element>(p.act, h, piece);
    if (interleaved) h.exchange();
    if (exists) {
      *reinterpret_cast<uint4*>(p.a.data + row * p.a.row_bytes + place.column * kElementBytes) =
          quad_of(piece.a);
      store_hidden(p.act, h, p.dh + row * p.h_row_bytes, place.column);
    }
    // A fixed order of the sum over the eight lanes: equal inputs give equal bits.
    float score = exists ? piece.score : 0.0f;
#pragma unroll
    for (int apart = 1; apart < 8; apart *= 2) score += __shfl_xor_sync(~0u, score, apart);
    if ((lane & 7) == 0 && exists) {
      p.score_parts[row * p.score_tiles + place.column / kWarpColumns] = score;
    }
  }
};

}  // namespace sonicmoe::cuda::portable
