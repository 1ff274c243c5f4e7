// Schedulers: which tile is number t, and how a cluster walks through the numbers.
#pragma once

#include <concepts>

#include "cuda/hopper/engine/pipeline.cuh"
#include "cuda/hopper/ptx/mbarrier.cuh"
#include "cuda/metadata/tile_record.h"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda {

/// For checking concepts.
inline constexpr TileShape kAnyShape{128, 256, 4, 1, 2, Schedule::kCooperative};

/// What one CTA does in a tile of its cluster.
struct Work {
  int expert;
  int row;     ///< in the grouped rows: first of the CTA, or of the expert where rows are K
  int left;    ///< output rows from the CTA's first on; none: the stages are only passed on
  int column;  ///< first output column
  int m;       ///< where rows are K: first output row of the CTA
  int depth;   ///< where rows are K: rows of the expert
  bool alone;  ///< the CTAs of the cluster share no B in this tile
};

/// A divisor that is known before the launch.
struct Divisor {
  std::uint32_t by;
  std::uint32_t inverse;  ///< 2^32 / by, rounded down; at most 2^32 - 1

  struct Result {
    int quotient;
    int rest;
  };
  __device__ __forceinline__ Result divide(std::uint32_t value) const {
    std::uint32_t quotient = __umulhi(value, inverse);  // at most one too small
    std::uint32_t rest = value - quotient * by;
    if (rest >= by) {
      quotient++;
      rest -= by;
    }
    return {static_cast<int>(quotient), static_cast<int>(rest)};
  }
};

/// Tiles over grouped rows (M varies by expert, K is fixed), from the list built on the device.
///
/// In clusters of two, what is numbered are shares: (record, tile of columns), records slowest, two
/// shares a tile. Records 2i and 2i + 1 of an expert form a pair: its tiles give one record to each
/// CTA and share their columns of B. An odd last record has no partner: its tiles give two tiles of
/// columns to the CTAs, each with its own B, so that no CTA idles for want of rows. Where a pair
/// begins at an odd share, its first and its last share are the halves of neighbouring tiles, each
/// with its own B too. Where kBands, so are those of a band: pairs that go through the columns
/// together, because a pair's columns would not stay in L2 for the next one.
struct RowTilesParams {
  const TileRecord* records;
  const std::int32_t* record_count;
  unsigned* counter;          ///< of drawn order, zero before the launch; null: static order
  std::int32_t columns;       ///< N
  std::int32_t column_tiles;  ///< tiles along N
  std::int32_t column_step;   ///< output columns of a tile
  std::int32_t k_tiles;       ///< k tiles of one part of K
  std::int32_t k_parts;       ///< 2: K runs through gate, then up
  std::int32_t band;          ///< of kBands: most pairs of a band, a power of two
  Divisor round;              ///< of kCutLast: clusters of the launch, or 1: nothing is cut
};

enum class RowWalk { kPairs, kBands, kCutLast };

template <RowWalk kWalk>
struct RowTilesOf {
  using Params = RowTilesParams;

  template <TileShape kShape>
  static __device__ __forceinline__ int count(const Params& p) {
    const Cut cut = cut_of<kShape>(p, ptx::load_again(p.record_count));
    return cut.begin + 2 * cut.tiles;
  }
  static constexpr bool kFixedDepth = true;
  static __device__ __forceinline__ int k_tiles(const Params& p, const Work&) {
    return p.k_tiles * p.k_parts;
  }

  template <TileShape kShape>
  static __device__ __forceinline__ Work work(const Params& p, int t, int rank) {
    const int across = p.column_tiles;
    int half = kWhole;
    if constexpr (kWalk == RowWalk::kCutLast) {
      const int begin = cut_of<kShape>(p, __ldg(p.record_count)).begin;
      if (t >= begin) {
        half = (t - begin) % 2;
        t = begin + (t - begin) / 2;
      }
    }
    const int share = t * kShape.cluster + rank;
    const int index = static_cast<unsigned>(share) / static_cast<unsigned>(across);
    if (kShape.cluster > 1 && index >= __ldg(p.record_count)) return {0, 0, 0, 0, 0, 0, true};
    const int4 raw = __ldg(reinterpret_cast<const int4*>(p.records) + index);
    const TileRecord record{raw.x, raw.y, raw.z, raw.w};
    int local = index - record.first;
    int n = share - index * across;
    bool alone = true;
    if constexpr (kShape.cluster > 1) {
      const bool paired = (local & 1) != 0 || (local + 1) * kShape.m < record.rows;
      if (paired) {
        const int band = kWalk == RowWalk::kBands ? 2 * p.band : 2;  // records of a whole one
        const int first = index - (local & (band - 1));              // of the band
        local &= ~(band - 1);
        const int pairs =
            kWalk == RowWalk::kBands
                ? min(p.band, (record.rows + kShape.m - 1) / kShape.cluster_rows() - local / 2)
                : 1;
        const int begin = first * across;
        const int at = share - begin;
        const int odd = begin & 1;
        alone = odd != 0 && (at == 0 || at == 2 * across * pairs - 1);
        const int tile = alone ? 0 : (at + odd) >> 1;
        n = static_cast<unsigned>(tile) / static_cast<unsigned>(pairs);
        local += 2 * (tile - n * pairs) + (alone ? rank ^ 1 : rank);
      }
    }
    int offset = local * kShape.m;
    int left = record.rows - offset;
    if (half != kWhole) {
      offset += half * (kShape.m / 2);
      left = min(left - half * (kShape.m / 2), kShape.m / 2);
    }
    return {record.expert, record.begin + offset, left, n * p.column_step, 0, 0, alone};
  }

 private:
  static constexpr int kWhole = -1;  // not a half of a tile

  /// The last tiles, of which each is two.
  struct Cut {
    int begin;
    int tiles;
  };
  template <TileShape kShape>
  static __device__ __forceinline__ Cut cut_of(const Params& p, int records) {
    const int tiles = (records * p.column_tiles + kShape.cluster - 1) / kShape.cluster;
    if constexpr (kWalk != RowWalk::kCutLast) return {tiles, 0};
    const int rest = p.round.divide(tiles).rest;
    const int cut = 2 * rest <= static_cast<int>(p.round.by) ? rest : 0;
    return {tiles - cut, cut};
  }
};

using RowTiles = RowTilesOf<RowWalk::kPairs>;
/// Those of kernels that have the registers.
using BandedRowTiles = RowTilesOf<RowWalk::kBands>;
/// Those of kernels that find a tile's place beside an epilogue.
using CutRowTiles = RowTilesOf<RowWalk::kCutLast>;

/// Tiles of one matrix an expert, (M, N) with K its rows.
///
/// A cluster's tile is rows for each of its two CTAs, over columns that they share. Where M ends
/// with rows for one CTA only (`odd`), the last line of tiles is these rows for both CTAs, over two
/// tiles of columns, each with its own B; an odd last tile of columns leaves the second CTA idle.
struct ExpertTiles {
  struct Params {
    const ExpertRecord* order;  ///< long experts first; null: as they are numbered
    const std::int32_t* expert_begin;
    const std::int32_t* expert_rows;
    unsigned* counter;  ///< of drawn order, zero before the launch; null: static order
    std::int32_t experts;
    std::int32_t rows;          ///< M
    std::int32_t columns;       ///< N
    std::int32_t lines;         ///< of tiles along M that have rows for both CTAs
    std::int32_t column_tiles;  ///< along N
    std::int32_t column_step;
    Divisor each;  ///< tiles of an expert
    /// Columns fastest: the tiles of a line. Else those of two tiles of columns, the last line's
    /// included.
    Divisor group;
    std::int32_t columns_fastest;
  };
  static constexpr bool kFixedDepth = false;

  template <TileShape kShape>
  static __device__ __forceinline__ int count(const Params& p) {
    return p.experts * static_cast<int>(p.each.by);
  }
  static __device__ __forceinline__ int k_tiles(const Params&, const Work& work) {
    return (work.depth + kDepth - 1) / kDepth;
  }
  /// A tile runs through all rows of its expert, so that a long expert taken late would leave the
  /// others waiting.
  template <TileShape kShape>
  static __device__ __forceinline__ Work work(const Params& p, int t, int rank) {
    static_assert(kShape.cluster == 2);
    const Divisor::Result expert = p.each.divide(t);
    const Divisor::Result at = p.group.divide(expert.rest);
    int line = at.quotient;
    int n = at.rest;
    if (p.columns_fastest == 0) {
      n = 2 * at.quotient + (at.rest >= p.lines ? 1 : 0);
      line = at.rest >= p.lines ? at.rest - p.lines : at.rest;
      if (n == p.column_tiles) line = p.lines;  // of an odd last tile of columns
    }
    Work work{};
    if (line == p.lines) {
      n = 2 * (p.columns_fastest == 0 ? at.quotient : at.rest);
      work.alone = n + 1 < p.column_tiles;
      if (work.alone) n += rank;
    }
    if (p.order != nullptr) {
      const int4 record = __ldg(reinterpret_cast<const int4*>(p.order) + expert.quotient);
      work.expert = record.x;
      work.row = record.y;
      work.depth = record.z;
    } else {
      work.expert = expert.quotient;
      work.row = __ldg(p.expert_begin + expert.quotient);
      work.depth = __ldg(p.expert_rows + expert.quotient);
    }
    work.m = line * kShape.cluster_rows() + (work.alone ? 0 : rank * kShape.m);
    work.left = p.rows - work.m;
    work.column = n * p.column_step;
    return work;
  }
};

template <class S>
concept TileScheduler = requires(const typename S::Params& p, int t) {
  { S::k_tiles(p, Work{}) } -> std::same_as<int>;
  { S::kFixedDepth } -> std::convertible_to<bool>;
  { S::template count<kAnyShape>(p) } -> std::same_as<int>;
  { S::template work<kAnyShape>(p, t, t) } -> std::same_as<Work>;
};

/// How many numbers a drawing warp runs ahead, which bounds how far clusters drift apart. kSlots
/// must cover it, and a ping-pong warpgroup that lags behind the loads by two tiles.
inline constexpr int kDrawnAhead = 2;

/// Who draws tile numbers in drawn order.
enum class Drawer { kProducer, kConsumer };

/// Who walks: a single thread, or a warp of which one lane speaks for all.
enum class Walker { kThread, kWarp };

/// The number after the last tile's. How many tiles there are is asked anew each time: who walks
/// has no register to hold it.
inline constexpr int kNoTile = -1;

template <class Scheduler, TileShape kShape>
__device__ __forceinline__ int tile_or_none(const typename Scheduler::Params& tiles, int tile) {
  return tile < Scheduler::template count<kShape>(tiles) ? tile : kNoTile;
}

/// The walk through a cluster's tiles: in static order it strides over the clusters, in drawn order
/// the numbers come from a counter, which keeps the active window of weights inside L2.
template <class Scheduler, TileShape kShape, Walker kWalker>
class TileStream {
 public:
  using Params = typename Scheduler::Params;
  __device__ __forceinline__ TileStream(const Cta<kShape>& cta, const Params& tiles)
      : cta_(cta), tiles_(tiles), tile_(tile_or_none<Scheduler, kShape>(tiles, cta.cluster())) {}
  __device__ __forceinline__ bool done() const { return tile_ == kNoTile; }
  __device__ __forceinline__ int tile() const { return tile_; }
  /// How many tiles came before; in drawn order only.
  __device__ __forceinline__ std::uint32_t taken() const { return taken_; }

  __device__ __forceinline__ void next() {
    if (tiles_.counter == nullptr) {
      tile_ = tile_or_none<Scheduler, kShape>(tiles_, tile_ + cta_.clusters());
      return;
    }
    const int slot = taken_ % kSlots;
    cta_.slot_full(slot).wait(taken_ / kSlots & 1);
    tile_ = ptx::load_word(cta_.slot(slot));
    if constexpr (kWalker == Walker::kWarp) __syncwarp();
    if (kWalker == Walker::kThread || (threadIdx.x & 31) == 0) {
      cta_.slot_empty(slot).arrive_at(0);
    }
    taken_++;
  }

 private:
  const Cta<kShape>& cta_;
  const Params& tiles_;
  int tile_;
  std::uint32_t taken_ = 0;  // slots read
};

/// Posts a tile number to every CTA of the cluster.
template <TileShape kShape>
__device__ __forceinline__ void post_tile(const Cta<kShape>& cta, int slot, int tile) {
  for (int c = 0; c < kShape.cluster; c++) {
    ptx::post_word(cta.slot(slot), cta.slot_full(slot), c, tile);
  }
}

/// A warp that does nothing else (one thread of rank 0): draws numbers and posts them.
template <class Scheduler, TileShape kShape>
__device__ __forceinline__ void draw_tiles(const Cta<kShape>& cta,
                                           const typename Scheduler::Params& tiles) {
  RingPosition<kSlots> position;
  RingPosition<kSlots> oldest;  // that may still be unread
  int posted = 0;
  for (int tile = tile_or_none<Scheduler, kShape>(tiles, cta.cluster()); tile != kNoTile;
       position.next()) {
    if (posted++ >= kDrawnAhead) {
      cta.slot_empty(oldest.stage).wait(oldest.parity);
      oldest.next();
    }
    const int drawn = static_cast<int>(ptx::count_up(tiles.counter)) + cta.clusters();
    tile = tile_or_none<Scheduler, kShape>(tiles, drawn);
    post_tile(cta, position.stage, tile);
  }
}

/// The same beside the products, for producers whose warps all load: a consumer thread of rank 0
/// asks for a number during a tile, and posts it under the tile's last products. Where producers
/// look the next tile up beside a tile, number t + 2 is posted in tile t, and number 1 before the
/// first one; where they do behind it, number t + 1.
template <class Scheduler, TileShape kShape>
class TileDraw {
 public:
  using Params = typename Scheduler::Params;
  __device__ __forceinline__ TileDraw(const Cta<kShape>& cta, const Params& tiles)
      : cta_(cta), tiles_(tiles) {}
  /// Number 1. Its slot is free, and asked for without a wait: see RingPosition::agree().
  __device__ __forceinline__ void begin() {
    ask();
    if (draws()) post_in(0);
    __syncwarp();
  }
  __device__ __forceinline__ void ask() {
    drawn_ = draws() ? ptx::count_up(tiles_.counter) : 0;  // never what an earlier tile left
  }
  /// What was asked for, as number t + 1.
  __device__ __forceinline__ void post(std::uint32_t t) const {
    if (draws()) {
      const int slot = t % kSlots;
      cta_.slot_empty(slot).wait((t / kSlots & 1) ^ 1);
      post_in(slot);
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ bool draws() const {
    return tiles_.counter != nullptr && threadIdx.x == kWarpgroup && cta_.rank() == 0;
  }
  __device__ __forceinline__ void post_in(int slot) const {
    const int tile = static_cast<int>(drawn_) + cta_.clusters();
    post_tile(cta_, slot, tile_or_none<Scheduler, kShape>(tiles_, tile));
  }

  const Cta<kShape>& cta_;
  const Params& tiles_;
  unsigned drawn_;
};

}  // namespace sonicmoe::cuda
