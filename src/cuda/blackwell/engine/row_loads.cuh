// The warps that load A and B of row products into the stages.
#pragma once

#include "cuda/blackwell/engine/barriers.cuh"
#include "cuda/blackwell/engine/tiles.cuh"
#include "cuda/blackwell/ptx/pair_copy.cuh"

namespace sonicmoe::cuda::blackwell {

/// Calls load(segment, kt) for each k tile, in order.
template <class Load>
__device__ __forceinline__ void for_each_k_tile(const Segment* segments, int count,
                                                const Load& load) {
#pragma unroll 1
  for (int s = 0; s < count; s++) {
#pragma unroll 1
    for (int kt = 0; kt < segments[s].k_tiles; kt++) load(segments[s], kt);
  }
}

/// A row warp: each of its first kLoadingLanes lanes loads four rows. Rows past the end of the
/// expert have the index -1, for which TMA writes zeros.
__device__ __forceinline__ void load_rows(const Segment* segments, const RowTilesParams& p,
                                          const Cta& cta, int warp, int lane) {
  const int line = (warp * kLoadingLanes + lane) * kGatheredRows;
  RowTiles tiles(p, cta, QueueReader::kWarp);
  StageRing ring;
  for (Tile tile; tiles.next(tile);) {
    const bool loads = lane < kLoadingLanes && line < tile.cta_rows;
    int ordered[kGatheredRows];
    int gathered[kGatheredRows];
#pragma unroll
    for (int i = 0; i < kGatheredRows; i++) {
      const int row = cta.rank * tile.cta_rows + line + i;
      ordered[i] = loads && row < tile.rows ? tile.row + row : -1;
      gathered[i] = ordered[i] >= 0 && p.index != nullptr ? __ldca(p.index + ordered[i]) : -1;
    }
    for_each_k_tile(segments, p.segments, [&](const Segment& segment, int kt) {
      const bool in_time = cta.empty(ring.at).wait(ring.parity ^ 1);
      if (loads && in_time) {
        int rows[kGatheredRows];
#pragma unroll
        for (int i = 0; i < kGatheredRows; i++) {
          rows[i] = segment.ordered != 0 ? ordered[i] : gathered[i];
        }
        ptx::pair_gather(cta.a(ring.at) + line * kLineBytes, &segment.rows,
                         ptx::in_even_cta(cta.full(ring.at).address()), kt * kDepth, rows);
      }
      __syncwarp();
      ring.next();
    });
  }
}

/// One thread: loads this CTA's columns of B. In the even CTA it also makes `full` expect the bytes
/// of both CTAs.
__device__ __forceinline__ void load_columns(const Segment* segments, const RowTilesParams& p,
                                             const Cta& cta) {
  RowTiles tiles(p, cta, QueueReader::kThread);
  StageRing ring;
  for (Tile tile; tiles.next(tile);) {
    const std::uint32_t bytes = kCtas * (tile.cta_rows * kLineBytes + tile.boxes() * kBoxBytes);
    // The matrix and the column of box b: those of the first box, and b times a step.
    const bool is_one = p.halves == Halves::kOneMatrix, in_cta = p.halves == Halves::kInEachCta;
    const int matrix = p.halves == Halves::kInEachPair ? cta.rank : 0;
    const int step = in_cta ? kBoxColumns : is_one ? tile.half_columns : 0;
    const int first = tile.column + cta.rank * step;
    for_each_k_tile(segments, p.segments, [&](const Segment& segment, int kt) {
      if (!cta.empty(ring.at).wait(ring.parity ^ 1)) return;
      if (cta.rank == 0) cta.full(ring.at).arrive_expecting(bytes);
      const std::uint32_t full = ptx::in_even_cta(cta.full(ring.at).address());
      const int k = kt * kDepth;
      const auto load = [&](int box) {
        const int column = first + (in_cta ? 0 : box * kBoxColumns);
        const ptx::Coord3 at = (p.operands & kMnMajorB) != 0 ? ptx::Coord3{column, k, tile.expert}
                                                             : ptx::Coord3{k, column, tile.expert};
        ptx::pair_load(cta.b(ring.at) + box * kBoxBytes, &segment.columns[in_cta ? box : matrix],
                       full, at);
      };
      load(0);
      if (tile.boxes() > 1) load(1);
      ring.next();
    });
  }
  wait_for_last_products(cta, ring);
}

}  // namespace sonicmoe::cuda::blackwell
