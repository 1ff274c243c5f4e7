// Loads the k tiles of a depth product: rows of one expert from two tensors, one of which is
// gathered.
#pragma once

#include <cstdint>

#include "cuda/portable/engine/fragments.cuh"
#include "cuda/portable/engine/tile_slots.cuh"
#include "cuda/portable/params.h"
#include "cuda/portable/shape.h"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/copy.cuh"

namespace sonicmoe::cuda::portable {

enum class Side { kLeft, kRight };

template <class OfTile, Side kGathered>
class DepthProducer {
 public:
  using Shape = OfTile;
  using Params = DepthTilesParams;
  static constexpr Major kMajorA = Major::kMN;
  static constexpr Major kMajorB = Major::kMN;
  static constexpr int kCopies = Shape::kCopies;
  static constexpr bool kStores = false;
  static constexpr int kFirstStore = 0;

  __device__ __forceinline__ explicit DepthProducer(const Params& p) {
    const int each = p.row_tiles * p.column_tiles;
    const int at = blockIdx.x / each;
    next_ = {at, static_cast<int>(blockIdx.x) - at * each, expert_of(p, at)};
    next_source_ = source(p, next_.rows, 0);
    ahead_ = after(p, next_);
    open(p);
    if (rows_.x != kNoExpert) coming_source_ = source(p, rows_, Shape::kDepth);
  }

  /// Issues copy i of the k tile. It has no branch, so that the compiler can place it between
  /// products.
  template <int i>
  __device__ __forceinline__ void copy(const Params& p, std::uint32_t stage) const {
    if constexpr (i < copies(Side::kLeft)) {
      copy_side<Side::kLeft, i>(p.left, stage);
    } else {
      copy_side<Side::kRight, i - copies(Side::kLeft)>(p.right, stage + Shape::kBytesA);
    }
  }

  /// Moves on to the next k tile, after all copies of this one.
  __device__ __forceinline__ void advance(const Params& p) {
    k_ += Shape::kDepth;
    other_ += Shape::kDepth * other(p).row_bytes;
    if (k_ >= rows_.z) {
      open(p);
    } else {
      source_ = coming_source_;
    }
    if (rows_.x != kNoExpert) coming_source_ = source(p, rows_, k_ + Shape::kDepth);
  }

 private:
  static constexpr int line_bytes(Side side) {
    return (side == Side::kLeft ? kTileRows : Shape::kColumns) * kElementBytes;
  }
  /// Lines that all threads of the CTA copy at once, and copies of a thread.
  static constexpr int lines(Side side) { return Shape::kThreads * 16 / line_bytes(side); }
  static constexpr int copies(Side side) { return Shape::kDepth / lines(side); }
  /// Lines of the gathered tensor that a warp copies at once.
  static constexpr int kWarpLines = lines(kGathered) / Shape::kWarps;
  /// rows_ after the last tile: no expert, so that advance() reads no index, and so many rows that
  /// advance() opens no further tile. present_ is 0, so copies read nothing and write zeros.
  static constexpr int kNoExpert = -1;
  static constexpr int kNoMore = 1 << 30;

  static __device__ __forceinline__ int chunk(Side side) {
    return threadIdx.x % (line_bytes(side) / 16);
  }
  static __device__ __forceinline__ int line(Side side) {
    return threadIdx.x / (line_bytes(side) / 16);
  }
  static __device__ __forceinline__ const Rows& gathered(const Params& p) {
    return kGathered == Side::kLeft ? p.left : p.right;
  }
  static __device__ __forceinline__ const Rows& other(const Params& p) {
    return kGathered == Side::kLeft ? p.right : p.left;
  }

  template <Side kSide, int i>
  __device__ __forceinline__ void copy_side(const Rows& rows, std::uint32_t stage) const {
    const std::uint32_t at =
        stage + line(kSide) * line_bytes(kSide) + ((chunk(kSide) ^ (line(kSide) & 7)) << 4);
    const std::uint8_t* from;
    if constexpr (kSide == kGathered) {
      const int row = __shfl_sync(~0u, source_, i * kWarpLines + line(kSide) % kWarpLines);
      from = ptx::row_address(columns_, row, static_cast<int>(rows.row_bytes));
    } else {
      from = other_ + i * lines(kSide) * rows.row_bytes;
    }
    const bool exists = k_ + line(kSide) + i * lines(kSide) < rows_.z;
    ptx::copy16(at + i * lines(kSide) * line_bytes(kSide), from,
                exists && (present_ >> static_cast<int>(kSide) & 1) != 0);
  }

  struct Tile {
    int at;      ///< position of its expert in the order of experts
    int number;  ///< of the tile within the expert
    int4 rows;   ///< ExpertRecord: expert, first row, rows
  };

  /// The record of the expert at a position in the order; past the last expert it has no rows.
  static __device__ __forceinline__ int4 expert_of(const Params& p, int at) {
    if (at >= p.experts) return {};
    if (p.longest_first == nullptr) return {at, p.expert_begin[at], p.expert_rows[at], 0};
    return reinterpret_cast<const int4*>(p.longest_first)[at];
  }

  /// This CTA's tile after `tile`. Its expert record is read here, two tiles before it is used.
  static __device__ __forceinline__ Tile after(const Params& p, const Tile& tile) {
    const int each = p.row_tiles * p.column_tiles;
    Tile next{tile.at + p.experts_apart, tile.number + p.tiles_apart, {}};
    if (next.number >= each) {
      next.number -= each;
      next.at++;
    }
    next.rows = expert_of(p, next.at);
    return next;
  }

  /// The source of one gathered row of the k tile that begins at k. A warp copies kDepth / 8
  /// gathered rows of a k tile. Each lane looks up the source of one of them, and copy_side() sends
  /// it by a shuffle to the lanes that copy the row.
  static __device__ __forceinline__ int source(const Params& p, const int4& rows, int k) {
    const std::int32_t* index = gathered(p).index;
    const int lane = threadIdx.x & 31 & (Shape::kDepth / 8 - 1);
    const int own = k + (threadIdx.x >> 5) * kWarpLines + lane % kWarpLines +
                    lane / kWarpLines * lines(kGathered);
    return index != nullptr && own < rows.z ? index[rows.y + own] : rows.y + own;
  }

  /// Begins the next tile and writes its slot. After the last tile the slot has no k tiles. A tile
  /// of an expert without rows has one k tile, of zeros.
  __device__ __forceinline__ void open(const Params& p) {
    TileSlot slot{};
    k_ = 0;
    present_ = 0;
    rows_ = {kNoExpert, 0, kNoMore, 0};
    if (next_.at < p.experts) {
      rows_ = next_.rows;
      source_ = next_source_;
      const int row_tile = next_.number / p.column_tiles;
      slot.expert = rows_.x;
      slot.row = row_tile * kTileRows;
      slot.rows = min(kTileRows, p.rows - slot.row);
      slot.column = (next_.number - row_tile * p.column_tiles) * Shape::kColumns;
      slot.k_tiles = max(1, (rows_.z + Shape::kDepth - 1) / Shape::kDepth);
      slot.summed = rows_.z;
      open_side<Side::kLeft>(p.left, slot.row, p.rows);
      open_side<Side::kRight>(p.right, slot.column, p.columns);
      next_ = ahead_;
      next_source_ = source(p, next_.rows, 0);
      ahead_ = after(p, ahead_);
    }
    if (threadIdx.x == 0) tile_slots()[count_ % kTileSlots] = slot;
    count_++;
  }

  template <Side kSide>
  __device__ __forceinline__ void open_side(const Rows& rows, int first, int width) {
    const int column = first + chunk(kSide) * 8;
    const std::uint8_t* from = rows.data + std::int64_t{column} * kElementBytes;
    present_ |= column < width ? 1u << static_cast<int>(kSide) : 0u;
    if constexpr (kSide == kGathered) {
      columns_ = from;
    } else {
      other_ = from + (rows_.y + line(kSide)) * rows.row_bytes;
    }
  }

  Tile next_;
  Tile ahead_;
  unsigned count_ = 0;
  unsigned present_;  // a bit for each side: whether this thread's columns exist
  int4 rows_{};       // ExpertRecord of the tile's expert
  int k_;
  int source_ = 0;               // for the current k tile
  int coming_source_ = 0;        // for the next k tile, so that no copy waits for its source
  int next_source_;              // for the first k tile of the next tile
  const std::uint8_t* columns_;  // this thread's columns of row 0, gathered tensor
  const std::uint8_t* other_;    // this thread's first line of the k tile, other tensor
};

}  // namespace sonicmoe::cuda::portable
