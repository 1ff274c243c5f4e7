// The tiles of a pair of CTAs. They come from the tile records, which have up to 128 rows of an
// expert: a tile has the rows of two records, or of an expert's odd last record alone.
//
// Tile t has record t / column_tiles. If this is the second record of a tile, the tile is skipped:
// its rows belong to the tile of the record before it. A pair's next tile is as many tiles away as
// there are pairs. Their number is odd (pairs_of() in launch.cc): with an even one, some pairs
// could get only tiles to skip.
#pragma once

#include "cuda/blackwell/params.h"

namespace sonicmoe::cuda::blackwell {

struct Tile {
  int expert;
  int row;           ///< first row in expert order
  int rows;          ///< rows of the expert from `row` on; may be more than the tile has
  int column;        ///< first column of a matrix
  int cta_rows;      ///< rows of each CTA: kCtaRows or kTailRows
  int half_columns;  ///< columns of D that each CTA loads B for: 64 or 128

  __device__ __forceinline__ bool is_tail() const { return cta_rows == kTailRows; }
  __device__ __forceinline__ int boxes() const { return half_columns > kBoxColumns ? 2 : 1; }
};

/// Walks through the tiles of this pair. Every warp walks by itself.
class TileWalk {
 public:
  __device__ __forceinline__ explicit TileWalk(const RowTilesParams& p)
      : p_(p),
        next_(static_cast<int>(blockIdx.x) / kCtas),
        count_(__ldg(p.record_count) * p.column_tiles) {}

  /// Sets `tile` to the next tile. False: there are no more.
  __device__ __forceinline__ bool next(Tile& tile) {
    for (; next_ < count_; next_ += static_cast<int>(gridDim.x) / kCtas) {
      const int record = next_ / p_.column_tiles;
      const int4 read = __ldg(reinterpret_cast<const int4*>(p_.records) + record);
      const int local = record - read.w;
      if (local % 2 != 0) continue;
      tile = tile_of(read, local * kRecordRows, next_ - record * p_.column_tiles);
      next_ += static_cast<int>(gridDim.x) / kCtas;
      return true;
    }
    return false;
  }

 private:
  __device__ __forceinline__ Tile tile_of(const int4& record, int offset, int column_tile) const {
    const int rows = record.z - offset;
    const int column = column_tile * p_.column_step;
    const int left = min(p_.columns - column, p_.column_step);
    const int half = p_.halves != 0 || left > kTileColumns / 2 ? kTileColumns / 2 : kBoxColumns;
    return {record.x, record.y + offset, rows, column, rows > kRecordRows ? kCtaRows : kTailRows,
            half};
  }

  const RowTilesParams& p_;
  int next_;
  int count_;
};

}  // namespace sonicmoe::cuda::blackwell
