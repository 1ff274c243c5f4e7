// Tile scheduler of products with one (M, N) output matrix an expert, whose K is the expert's rows:
// the weight gradients.
//
// In a cluster's tile the two CTAs compute different rows over the same columns and share B. If M
// ends with rows for one CTA only, both CTAs compute these rows, in tiles of their own: each CTA
// another column tile, with its own B. If the number of column tiles is odd, the second CTA
// computes nothing in the last of these tiles.
//
// Tiles are numbered by expert, then by raster group. With columns_fastest a group is one row of
// tiles; the tiles whose rows both CTAs compute are the last group. Else a group is two columns of
// tiles: the row tiles of the first column, the row tiles of the second, then the tile whose rows
// both CTAs compute.
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
  /// A tile runs through all rows of its expert. So experts with many rows come first
  /// (longest_first): if the longest tile started last, the other clusters would idle until its
  /// end.
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
      // The last group may have one column tile only: the tile of shared rows follows its row
      // tiles.
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
