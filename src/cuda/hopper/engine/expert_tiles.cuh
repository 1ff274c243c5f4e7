// Tile scheduler of depth products (the weight gradients): one (M, N) output matrix per expert. K
// is the number of the expert's rows.
//
// In a tile of a cluster the two CTAs compute different rows of M over the same columns, and share
// B. If M is an odd number of CTA tiles, the last rows are enough for one CTA only. Then both CTAs
// compute these last rows: each CTA another column tile, with its own B (own_b). If the number of
// column tiles is odd, the second CTA computes nothing in the last of these tiles.
//
// Tiles are numbered by expert, then by raster group:
//
//   | columns_fastest | a group is                                                              |
//   | 1               | one row of tiles; the last rows are a group too                         |
//   | 0               | two columns of tiles: the row tiles of the first column, the row tiles  |
//   |                 | of the second column, then one tile with the last rows of both columns  |
//
// The tile of each part of an expert's matrix, with row_tiles = 2, column_tiles = 3 and last rows:
//
//   columns_fastest    1            0
//   column tile        0  1  2      0  1  2
//   row tile 0         0  1  2      0  2  5
//   row tile 1         3  4  5      1  3  6
//   last rows          6  6  7      4  4  7      a tile with two columns: each CTA computes one
#pragma once

#include "cuda/hopper/engine/tile.cuh"
#include "cuda/metadata/tile_record.h"

namespace sonicmoe::cuda {

struct ExpertTiles {
  using Params = ExpertTilesParams;
  static constexpr bool kFixedDepth = false;
  static constexpr bool kCoherent = true;

  template <TileShape kShape>
  static __device__ __forceinline__ int count(const Params& p) {
    return p.experts * static_cast<int>(p.tiles_per_expert.by);
  }
  static __device__ __forceinline__ int k_tiles(const Params&, const CtaTile& tile) {
    return (tile.depth + kDepth - 1) / kDepth;
  }
  /// The time of a tile grows with the number of its expert's rows. So experts with many rows come
  /// first (longest_first). If the longest tile started last, the other clusters would be idle
  /// until its end.
  template <TileShape kShape>
  static __device__ __forceinline__ CtaTile tile(const Params& p, int t, int rank) {
    static_assert(kShape.cluster == 2);
    const Quotient expert = divide(t, p.tiles_per_expert);
    const Quotient at = divide(expert.rest, p.raster_group);
    int m = at.quotient;  // row tile
    int n = at.rest;      // column tile
    if (p.columns_fastest == 0) {
      n = 2 * at.quotient + (at.rest >= p.row_tiles ? 1 : 0);
      m = at.rest >= p.row_tiles ? at.rest - p.row_tiles : at.rest;
      // If the last group has one column only, the tile with the last rows follows its row tiles.
      if (n == p.column_tiles) m = p.row_tiles;
    }
    CtaTile tile{};
    if (m == p.row_tiles) {
      n = 2 * (p.columns_fastest == 0 ? at.quotient : at.rest);
      tile.own_b = n + 1 < p.column_tiles;
      if (tile.own_b) n += rank;
    }
    if (p.longest_first != nullptr) {
      const int4 record = __ldca(reinterpret_cast<const int4*>(p.longest_first) + expert.quotient);
      tile.expert = record.x;
      tile.row = record.y;
      tile.depth = record.z;
    } else {
      tile.expert = expert.quotient;
      tile.row = __ldca(p.expert_begin + expert.quotient);
      tile.depth = __ldca(p.expert_rows + expert.quotient);
    }
    tile.output_row = m * kShape.cluster_rows() + (tile.own_b ? 0 : rank * kShape.m);
    tile.valid_rows = p.rows - tile.output_row;
    tile.column = n * p.column_step;
    return tile;
  }
};

}  // namespace sonicmoe::cuda
