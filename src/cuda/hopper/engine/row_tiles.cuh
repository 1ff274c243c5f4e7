// Tile scheduler of row products: M varies by expert, K is fixed. The tiles come from the tile
// records that the metadata kernels write. A record has up to 128 rows of an expert.
//
// A CTA tile has the rows of one record and the columns of one column tile. CTA tiles are numbered
// record by record. Tile t of a cluster of two is the CTA tiles 2t and 2t + 1.
//
// Records 2i and 2i + 1 of an expert are a pair. The CTA tiles of a pair are renumbered: in a tile
// of a cluster each CTA has one record of the pair, over the same columns, so that the CTAs share B
// by multicast. Example with three column tiles; r0 and r1 are a pair, r2 is an odd last record:
//
//   CTA tile        0  1 | 2  3 | 4  5 | 6  7 | 8  9
//   record          r0 r1| r0 r1| r0 r1| r2 r2| r2 r3 (next expert)
//   column tile     0  0 | 1  1 | 2  2 | 0  1 | 2  0
//   B               shared for a pair  | each CTA its own
//
// For an odd last record each CTA computes another column tile, so that both CTAs have rows. A pair
// may begin at an odd CTA tile, as r3 and r4 do (CTA tiles 9 to 14). Then its column tile 0 is
// computed without multicast: r3 in CTA tile 9, the second CTA of a cluster's tile, and r4 in CTA
// tile 14, the first CTA of a later one. The pair's other column tiles share B as usual.
#pragma once

#include "cuda/hopper/engine/tile.cuh"
#include "cuda/metadata/tile_record.h"
#include "cuda/ptx/global.cuh"

namespace sonicmoe::cuda {

/// The order of the tile indices.
enum class RasterOrder {
  kColumns,        ///< a pair's column tiles follow each other
  kGrouped,        ///< `raster_group` pairs of an expert form a group: all pairs of a group visit
                   ///< column tile j before any visits j + 1. If an expert's matrix does not stay
                   ///< in L2, its columns are then read once per group instead of once per pair
  kSplitLastWave,  ///< as kColumns; if the last wave fills at most half of the clusters, each of
                   ///< its tiles is split into two of half the rows
};

template <RasterOrder kOrder>
struct RowTilesOf {
  using Params = RowTilesParams;
  static constexpr bool kFixedDepth = true;
  static constexpr bool kCoherent = kOrder == RasterOrder::kGrouped;

  template <TileShape kShape>
  static __device__ __forceinline__ int count(const Params& p) {
    const LastWave last = last_wave<kShape>(p, load_count(p));
    return last.begin + 2 * last.split_tiles;
  }
  static __device__ __forceinline__ int k_tiles(const Params& p, const CtaTile&) {
    return p.k_tiles * p.k_parts + p.low_rank_k_tiles;
  }

  template <TileShape kShape>
  static __device__ __forceinline__ CtaTile tile(const Params& p, int t, int rank) {
    const int across = p.column_tiles;
    int half = kWhole;
    if constexpr (kOrder == RasterOrder::kSplitLastWave) {
      const int begin = last_wave<kShape>(p, __ldg(p.record_count)).begin;
      if (t >= begin) {
        half = (t - begin) % 2;
        t = begin + (t - begin) / 2;
      }
    }
    const int cta_tile = t * kShape.cluster + rank;
    const int index = static_cast<unsigned>(cta_tile) / static_cast<unsigned>(across);
    // If the number of CTA tiles is odd, the second CTA of the last tile has no rows.
    if (kShape.cluster > 1 && index >= load(p.record_count)) return {0, 0, 0, 0, 0, 0, true};
    const int4 raw = load(reinterpret_cast<const int4*>(p.records) + index);
    const TileRecord record{raw.x, raw.y, raw.z, raw.w};
    int local = index - record.first;  // record of the expert
    int n = cta_tile - index * across;
    bool own_b = true;
    if constexpr (kShape.cluster > 1) {
      const bool paired = (local & 1) != 0 || (local + 1) * kShape.m < record.rows;
      if (paired) {
        constexpr bool kGrouped = kOrder == RasterOrder::kGrouped;
        const int group = kGrouped ? 2 * p.raster_group : 2;  // records of a full group
        const int first = index - (local & (group - 1));      // record of this group
        local &= ~(group - 1);
        const int pairs =
            kGrouped ? min(p.raster_group,
                           (record.rows + kShape.m - 1) / kShape.cluster_rows() - local / 2)
                     : 1;
        const int begin = first * across;
        const int at = cta_tile - begin;
        const int odd = begin & 1;
        own_b = odd != 0 && (at == 0 || at == 2 * across * pairs - 1);
        const int tile = own_b ? 0 : (at + odd) >> 1;
        n = static_cast<unsigned>(tile) / static_cast<unsigned>(pairs);
        local += 2 * (tile - n * pairs) + (own_b ? rank ^ 1 : rank);
      }
    }
    int offset = local * kShape.m;
    int valid_rows = record.rows - offset;
    if (half != kWhole) {
      offset += half * (kShape.m / 2);
      valid_rows = min(valid_rows - half * (kShape.m / 2), kShape.m / 2);
    }
    return {record.expert, record.begin + offset, valid_rows, n * p.column_step, 0, 0, own_b};
  }

 private:
  static constexpr int kWhole = -1;  // the tile is not split

  /// Coherent loads (ld.global.ca) for kernels that may read before their griddepcontrol.wait; the
  /// others wait first and use ld.global.nc.
  template <class T>
  static __device__ __forceinline__ T load(const T* pointer) {
    if constexpr (kCoherent) {
      return __ldca(pointer);
    } else {
      return __ldg(pointer);
    }
  }
  static __device__ __forceinline__ int load_count(const Params& p) {
    if constexpr (kCoherent) {
      return __ldca(p.record_count);
    } else {
      return ptx::load_again(p.record_count);
    }
  }

  /// The tiles that are split into two: tile `begin` and those after it.
  struct LastWave {
    int begin;
    int split_tiles;
  };
  template <TileShape kShape>
  static __device__ __forceinline__ LastWave last_wave(const Params& p, int records) {
    const int tiles = (records * p.column_tiles + kShape.cluster - 1) / kShape.cluster;
    if constexpr (kOrder != RasterOrder::kSplitLastWave) return {tiles, 0};
    const int rest = divide(tiles, p.wave).rest;
    const int split = 2 * rest <= static_cast<int>(p.wave.by) ? rest : 0;
    return {tiles - split, split};
  }
};

using RowTiles = RowTilesOf<RasterOrder::kColumns>;
/// For kernels with free registers: tile() needs more registers than in RowTiles.
using GroupedRowTiles = RowTilesOf<RasterOrder::kGrouped>;
/// For kernels whose producer computes the next tile while the consumers run an epilogue: tile()
/// takes longer than in RowTiles.
using SplitRowTiles = RowTilesOf<RasterOrder::kSplitLastWave>;

}  // namespace sonicmoe::cuda
