// The warps that load the operands of depth products into the stages. K is the rows of an expert:
// both operands are MN-major, in groups of 64 columns of the operand by 64 rows (8 KB). In the last
// k tile rows past the end of the expert have the index -1, for which TMA writes zeros.
#pragma once

#include "cuda/blackwell/engine/barriers.cuh"
#include "cuda/blackwell/engine/tiles.cuh"
#include "cuda/blackwell/ptx/pair_copy.cuh"

namespace sonicmoe::cuda::blackwell {

/// The part of an operand that a CTA loads for a tile.
struct DepthSide {
  std::uint32_t offset;  ///< in a stage
  int column;            ///< of the operand
  int groups;            ///< of 64 columns: 1 or 2

  /// Of A, whose columns are D's rows, or of B.
  __device__ __forceinline__ DepthSide(const DepthTile& tile, int rank, bool is_b)
      : offset(is_b ? kStageBytesA : 0),
        column(is_b ? tile.column + rank * tile.half_columns : tile.row + rank * tile.cta_rows),
        groups(is_b ? tile.boxes() : tile.cta_rows / kBoxColumns) {}
};

/// Four rows that a lane loads by one gather4: in expert order, or by index.
struct FourRows {
  int rows[kGatheredRows];

  /// Rows `first` and on of the expert; `index` null: in expert order.
  __device__ __forceinline__ FourRows(const DepthTile& tile, int first, const std::int32_t* index) {
#pragma unroll
    for (int i = 0; i < kGatheredRows; i++) {
      const int row = tile.summed_row + first + i;
      rows[i] = first + i >= tile.summed_rows ? -1 : index != nullptr ? __ldca(index + row) : row;
    }
  }
};

/// A row warp: lane l loads rows 4 (l % 4) and on of the warp's 16 rows, in group l / 4.
__device__ __forceinline__ void load_gathered(const DepthOperands& operands,
                                              const DepthTilesParams& p, const Cta& cta, int warp,
                                              int lane) {
  constexpr int kLanes = kDepth / kRowWarps / kGatheredRows;
  const int first = (warp * kLanes + lane % kLanes) * kGatheredRows;
  const int group = lane / kLanes;
  DepthTiles tiles(p, cta, QueueReader::kWarp);
  StageRing ring;
  for (DepthTile tile; tiles.next(tile);) {
    const DepthSide side(tile, cta.rank, p.gathers_b != 0);
    const bool loads = group < side.groups;
    FourRows next(tile, first, p.index);
#pragma unroll 1
    for (int kt = 0; kt < tile.k_tiles; kt++) {
      const FourRows now = next;
      // Loaded here, so that the wait hides the latency.
      next = FourRows(tile, (kt + 1) * kDepth + first, p.index);
      const bool in_time = cta.empty(ring.at).wait(ring.parity ^ 1);
      if (loads && in_time) {
        ptx::pair_gather(cta.a(ring.at) + side.offset + group * kBoxBytes + first * kLineBytes,
                         &operands.gathered, ptx::in_even_cta(cta.full(ring.at).address()),
                         side.column + group * kBoxColumns, now.rows);
      }
      __syncwarp();
      ring.next();
    }
  }
}

/// The column warp: loads the rows in expert order, by boxes of 64 rows. A box past the expert
/// would have rows of the next one, so the last k tile is gathered: lane l loads rows 4 (l % 16)
/// and on, in group l / 16. In the even CTA the warp also makes `full` expect the bytes of both
/// CTAs.
__device__ __forceinline__ void load_ordered(const DepthOperands& operands,
                                             const DepthTilesParams& p, const Cta& cta, int lane) {
  constexpr int kLanes = kDepth / kGatheredRows;
  DepthTiles tiles(p, cta, QueueReader::kWarp);
  StageRing ring;
  for (DepthTile tile; tiles.next(tile);) {
    const DepthSide side(tile, cta.rank, p.gathers_b == 0);
    const std::uint32_t bytes = kCtas * (tile.cta_rows * kLineBytes + tile.boxes() * kBoxBytes);
#pragma unroll 1
    for (int kt = 0; kt < tile.k_tiles; kt++) {
      const bool in_time = cta.empty(ring.at).wait(ring.parity ^ 1);
      const int groups = in_time ? side.groups : 0;
      if (cta.rank == 0 && lane == 0 && in_time) cta.full(ring.at).arrive_expecting(bytes);
      const std::uint32_t full = ptx::in_even_cta(cta.full(ring.at).address());
      const std::uint32_t target = cta.a(ring.at) + side.offset;
      if ((kt + 1) * kDepth <= tile.summed_rows) {
        if (lane < groups) {
          ptx::pair_load(target + lane * kBoxBytes, &operands.boxes, full,
                         {side.column + lane * kBoxColumns, tile.summed_row + kt * kDepth, 0});
        }
      } else if (lane / kLanes < groups) {
        const int first = lane % kLanes * kGatheredRows;
        const int group = lane / kLanes;
        const FourRows four(tile, kt * kDepth + first, nullptr);
        ptx::pair_gather(target + group * kBoxBytes + first * kLineBytes, &operands.ordered, full,
                         side.column + group * kBoxColumns, four.rows);
      }
      __syncwarp();
      ring.next();
    }
  }
  wait_for_last_products(cta, ring);
}

}  // namespace sonicmoe::cuda::blackwell
