// The tiles of a pair of CTAs.
//
// Row products: the tiles come from the tile records, which have up to 128 rows of an expert. A
// tile has the rows of two records, or of an expert's odd last record alone. Tile t has record t /
// column_tiles. If this is the second record of a tile, the tile is skipped: its rows belong to the
// tile of the record before it. In static
// order a pair's next tile is as many tiles away as there are pairs. Their number is odd
// (odd_pairs() in row_products.cc): with an even one, some pairs could get only tiles to skip.
//
// Depth products: the tiles of an expert's matrix follow each other, its columns first.
#pragma once

#include "cuda/blackwell/engine/tile_queue.cuh"
#include "cuda/blackwell/params.h"

namespace sonicmoe::cuda::blackwell {

/// A part of D. Its rows are those of an expert, in expert order, or those of an expert's matrix.
struct Tile {
  int expert;
  int row;           ///< first row
  int rows;          ///< rows from `row` on; may be more than the tile has
  int column;        ///< first column of a matrix
  int cta_rows;      ///< rows of each CTA: kCtaRows or kTailRows
  int half_columns;  ///< columns of D that each CTA loads B for: 64 or 128
  int k_tiles;       ///< 0: D is 0, and nothing is multiplied

  __device__ __forceinline__ bool is_tail() const { return cta_rows == kTailRows; }
  __device__ __forceinline__ int boxes() const { return half_columns > kBoxColumns ? 2 : 1; }
};

/// A tile of a depth product.
struct DepthTile : Tile {
  int summed_row;   ///< first row of the expert, in expert order
  int summed_rows;  ///< of the expert
};

__device__ __forceinline__ int cta_rows_of(int rows) {
  return rows > kRecordRows ? kCtaRows : kTailRows;
}
__device__ __forceinline__ int half_columns_of(int columns) {
  return columns > kTileColumns / 2 ? kTileColumns / 2 : kBoxColumns;
}

/// Walks through the tiles of this pair. Every warp walks by itself.
class RowTiles {
 public:
  /// Whether a pair may have no tile: the host does not know the number of records.
  static constexpr bool kMayBeNone = true;

  __device__ __forceinline__ RowTiles(const RowTilesParams& p, const Cta& cta, QueueReader reader)
      : p_(p), indices_(cta, p.tile_counter, reader), count_(count(p)) {}

  static __device__ __forceinline__ int count(const RowTilesParams& p) {
    return __ldca(p.record_count) * p.column_tiles;
  }

  /// Sets `tile` to the next tile. False: there are no more.
  __device__ __forceinline__ bool next(Tile& tile) {
    for (int index = indices_.next(); index < count_; index = indices_.next()) {
      const int record = index / p_.column_tiles;
      const int4 read = __ldca(reinterpret_cast<const int4*>(p_.records) + record);
      const int local = record - read.w;
      if (local % 2 != 0) continue;
      tile = tile_of(read, local * kRecordRows, index - record * p_.column_tiles);
      return true;
    }
    return false;
  }

 private:
  __device__ __forceinline__ Tile tile_of(const int4& record, int offset, int column_tile) const {
    const int rows = record.z - offset;
    const int column = column_tile * p_.column_step;
    const int left = min(p_.columns - column, p_.column_step);
    const int half = p_.halves == Halves::kOneMatrix ? half_columns_of(left) : kTileColumns / 2;
    const int cta_rows = p_.has_tails != 0 ? cta_rows_of(rows) : kCtaRows;
    return {record.x, record.y + offset, rows, column, cta_rows, half, p_.k_tiles};
  }

  const RowTilesParams& p_;
  TileIndices indices_;
  int count_;
};

class DepthTiles {
 public:
  /// The launch has at most as many pairs as tiles (pairs_of() in launch.cc).
  static constexpr bool kMayBeNone = false;

  __device__ __forceinline__ DepthTiles(const DepthTilesParams& p, const Cta& cta,
                                        QueueReader reader)
      : p_(p), indices_(cta, p.tile_counter, reader) {}

  static __device__ __forceinline__ int count(const DepthTilesParams& p) {
    return p.experts * p.row_tiles * p.column_tiles;
  }

  __device__ __forceinline__ bool next(DepthTile& tile) {
    const int index = indices_.next();
    if (index >= count(p_)) return false;
    const int each = p_.row_tiles * p_.column_tiles;
    const int at = index / each;
    const int in_expert = index - at * each;
    const int row_tile = in_expert / p_.column_tiles;
    ExpertRecord expert{at, 0, 0, 0};
    if (p_.longest_first != nullptr) {
      const int4 read = __ldca(reinterpret_cast<const int4*>(p_.longest_first) + at);
      expert = {read.x, read.y, read.z, read.w};
    } else {
      expert.begin = __ldca(p_.expert_begin + at);
      expert.rows = __ldca(p_.expert_rows + at);
    }
    tile.expert = expert.expert;
    tile.row = row_tile * kCtas * kCtaRows;
    tile.rows = p_.rows - tile.row;
    tile.column = (in_expert - row_tile * p_.column_tiles) * kTileColumns;
    tile.cta_rows = cta_rows_of(tile.rows);
    tile.half_columns = half_columns_of(p_.columns - tile.column);
    tile.k_tiles = (expert.rows + kDepth - 1) / kDepth;
    tile.summed_row = expert.begin;
    tile.summed_rows = expert.rows;
    return true;
  }

 private:
  const DepthTilesParams& p_;
  TileIndices indices_;
};

}  // namespace sonicmoe::cuda::blackwell
