// Loads the k tiles of a row product: rows, gathered or in order, and the weights of their expert.
#pragma once

#include <cstdint>

#include "cuda/portable/engine/fragments.cuh"
#include "cuda/portable/engine/tile_slots.cuh"
#include "cuda/portable/params.h"
#include "cuda/portable/shape.h"
#include "cuda/ptx/copy.cuh"

namespace sonicmoe::cuda::portable {

/// Weights that are not packed.
struct Elements {
  struct Nothing {
    static constexpr bool kIsPacked = false;
    static constexpr int kFirstStore = 0, kFirstRow = 0;
    using Params = RowTilesParams;
  };
  template <class Shape, Major kMajor, ColumnOrder kOrder>
  using Line = Nothing;
};

/// `ForEpilogue` says in which order its accumulators have the columns of K-major weights. That
/// depends on the architecture, so that the order cannot be an argument of this template: host and
/// device would have other names for the kernel. `Weights` is Elements, Digits or Fp8.
template <class OfTile, Major kWeights, class ForEpilogue, class Weights = Elements>
class RowProducer {
  static constexpr ColumnOrder kColumnOrder = ForEpilogue::kColumnOrder;
  using Packed = typename Weights::template Line<OfTile, kWeights, kColumnOrder>;
  static constexpr bool kIsPacked = Packed::kIsPacked;

 public:
  using Shape = OfTile;
  using Params = typename Packed::Params;
  static constexpr Major kMajorA = Major::kK;
  static constexpr Major kMajorB = kWeights;
  /// Calls of copy() for a k tile, and the first one that writes to the stage.
  static constexpr int kCopies = [] {
    if constexpr (kIsPacked) return Packed::kPlaces;
    return Shape::kCopies;
  }();
  static constexpr int kFirstStore = Packed::kFirstStore;
  /// Whether copy() also stores to the stage by ordinary stores.
  static constexpr bool kStores = kIsPacked;

  __device__ __forceinline__ explicit RowProducer(const Params& p) : records_(*p.record_count) {
    const int record = blockIdx.x / p.column_tiles;
    take(record, static_cast<int>(blockIdx.x) - record * p.column_tiles, record_of(p, record));
    find_sources(p);
    look_ahead(p);
    open(p);
    if constexpr (kIsPacked) begin_codes(p);
  }

  /// Issues copy i of the k tile. It has no branch, so that the compiler can place it between
  /// products.
  template <int i>
  __device__ __forceinline__ void copy(const Params& p, std::uint32_t stage) {
    if constexpr (kIsPacked) {
      unpack_weights<i>(p, stage + Shape::kBytesA);
    }
    constexpr int kRow = i - Packed::kFirstRow;
    if constexpr (kRow >= 0 && kRow < kRowsEach) {
      const std::uint32_t at =
          stage + line() * Shape::kLineBytes + ((chunk() ^ Shape::swizzle(line())) << 4);
      ptx::copy16(at + kRow * kApart * Shape::kLineBytes, a_[kRow],
                  inside(p) && (present_ >> kRow & 1) != 0);
      a_[kRow] += Shape::kDepth * kElementBytes;
    } else if constexpr (!kIsPacked) {
      copy_weights<i - kRowsEach>(p, stage + Shape::kBytesA);
    }
  }

  /// Whether the operand after copy() number i is to depend on unpacked weights, and a zero that
  /// does.
  static constexpr bool has_zero(int i) { return Packed::has_zero(i); }
  __device__ __forceinline__ std::uint32_t zero(const Params& p) const {
    return weights_.zero(p.codes);
  }

  /// Moves on to the next k tile, after all copies of this one.
  __device__ __forceinline__ void advance(const Params& p) {
    k_ += Shape::kDepth;
    if constexpr (kIsPacked) {
      if (is_low_rank()) weights_.advance_factor(matrices(p, half()));
    } else if constexpr (kIsKMajor) {
      b_[0] += Shape::kDepth * kElementBytes;
      b_[1] += Shape::kDepth * kElementBytes;
    } else {
      b_[0] += Shape::kDepth * matrices(p, half()).line_bytes;
    }
    if (k_ >= p.depth) next_part(p);
    if constexpr (kIsPacked) seek_codes(p);
  }

 private:
  static constexpr bool kIsKMajor = kWeights == Major::kK;
  static constexpr int kRowsEach = kTileRows * Shape::kLineChunks / Shape::kThreads;
  static constexpr int kLinesEach = Shape::kColumns * Shape::kLineChunks / Shape::kThreads;
  /// For K-major weights: lines between two copies of a thread, and its copies for half a tile.
  static constexpr int kApart = Shape::kThreads / Shape::kLineChunks;
  static constexpr int kHalf = kLinesEach / 2;
  static_assert(kColumnOrder == ColumnOrder::kAscending || kApart % 32 == 0,
                "the swizzle of all lines of a thread must be the same");
  /// The bit of present_ for the first line of weights.
  static constexpr int kFirstWeight = kRowsEach;
  /// The bits of packed weights: kFirstWeight for the next codes, this one for a factor.
  static constexpr int kFactor = kFirstWeight + 1;
  /// part_ in a low-rank term.
  static constexpr int kLowRank = 2;
  /// k_ after the last tile: so far below K that advance() never reaches the end of a part.
  /// present_ is 0, so copies read nothing and write zeros.
  static constexpr int kNoMore = -(1 << 30);

  static __device__ __forceinline__ int chunk() { return threadIdx.x % Shape::kLineChunks; }
  static __device__ __forceinline__ int line() { return threadIdx.x / Shape::kLineChunks; }
  /// For weights that are not K-major: the half of the tile's columns that this thread copies.
  static __device__ __forceinline__ int half() {
    if constexpr (kIsPacked) return Packed::half();
    return threadIdx.x % Shape::kColumnChunks / (Shape::kColumnChunks / 2);
  }

  __device__ __forceinline__ bool inside(const Params& p) const {
    return k_ + chunk() * 8 < p.depth;
  }

  /// The index of the weights of one half of the tile (gate or up) in a part of K.
  static __device__ __forceinline__ int matrix(const Params& p, int part, int half) {
    return p.second_half == 0 ? part + half : part;
  }
  /// Those in the current part of K.
  __device__ __forceinline__ const Matrices& matrices(const Params& p, int half) const {
    return p.weights[matrix(p, part_, half)];
  }

  __device__ __forceinline__ bool is_low_rank() const { return part_ == kLowRank; }

  /// Place i of the work on packed weights. Their codes are copied a k tile earlier than the rows.
  template <int i>
  __device__ __forceinline__ void unpack_weights(const Params& p, std::uint32_t stage) {
    weights_.template unpack<i>(p.codes, stage, !is_low_rank());
    if constexpr (i == Packed::kFetch) {
      if (is_low_rank()) {
        const int chunks = kIsKMajor ? (p.depth - k_) / 8 : 4;
        const bool exists = has_k(p, k_) && (present_ >> kFactor & 1) != 0;
        weights_.copy(matrices(p, half()), stage, exists ? chunks : 0);
      } else {
        fetch_codes(p, k_ + Shape::kDepth < p.depth ? k_ + Shape::kDepth : 0);
      }
    }
  }

  /// Whether the thread's k of a k tile that begins at `k` exists.
  static __device__ __forceinline__ bool has_k(const Params& p, int k) {
    return kIsKMajor || k + Packed::k() < p.depth;
  }

  /// Whether the codes at weights_, which begin at `k` of their part, exist.
  __device__ __forceinline__ bool has_codes(const Params& p, int k) const {
    return has_k(p, k) && (present_ >> kFirstWeight & 1) != 0;
  }
  __device__ __forceinline__ void fetch_codes(const Params& p, int k) {
    weights_.fetch(p.codes, has_codes(p, k));
  }

  /// Copies the codes of the first k tile.
  __device__ __forceinline__ void begin_codes(const Params& p) {
    const int first = static_cast<int>(blockIdx.x) % p.column_tiles * p.column_step;
    const int record = blockIdx.x / p.column_tiles;
    open_codes(p, 0, record_of(p, record).x, first, record < records_);
    fetch_codes(p, 0);
    Packed::prepare(p.codes);
    __syncthreads();
    seek_codes(p);
  }

  /// Goes to the codes of the k tile after that of the rows. In a low-rank term they are those of
  /// the next tile, and fetched already.
  __device__ __forceinline__ void seek_codes(const Params& p) {
    if (is_low_rank()) return;
    weights_.find_scale(p.codes, has_codes(p, k_));
    if (k_ + Shape::kDepth < p.depth) {
      weights_.advance_codes(p, matrix(p, part_, half()));
    } else if (part_ + 1 < p.parts) {
      const Place place = current(p);
      open_codes(p, part_ + 1, p.records[place.record].expert, place.column_tile * p.column_step,
                 true);
    } else {
      open_codes(p, 0, record_of(p, next_.record).x, next_.column_tile * p.column_step,
                 next_.record < records_);
    }
  }

  __device__ __forceinline__ void open_codes(const Params& p, int part, int expert,
                                             int first_column, bool exists) {
    const int first = first_column + half() * p.second_half;
    weights_.open_codes(p, matrix(p, part, half()), expert, first);
    exists = exists && first + Packed::column() < p.columns;
    present_ = (present_ & ~(1u << kFirstWeight)) | (exists ? 1u << kFirstWeight : 0u);
  }

  template <int i>
  __device__ __forceinline__ void copy_weights(const Params& p, std::uint32_t stage) const {
    if constexpr (kIsKMajor) {
      const std::uint32_t at = stage + line() * Shape::kLineBytes +
                               ((chunk() ^ Shape::template swizzle<kColumnOrder>(line())) << 4);
      const std::uint8_t* from = b_[i / kHalf] + i % kHalf * apart_[i / kHalf];
      ptx::copy16(at + i * kApart * Shape::kLineBytes, from,
                  inside(p) && (present_ >> (kFirstWeight + i) & 1) != 0);
    } else {
      const int k = threadIdx.x / Shape::kColumnChunks;
      const std::uint32_t at =
          stage + k * Shape::kColumnChunks * 16 + ((threadIdx.x % Shape::kColumnChunks ^ k) << 4);
      ptx::copy16(at + i * 8 * Shape::kColumnChunks * 16, b_[0] + i * apart_[0],
                  (present_ >> kFirstWeight & 1) != 0 && k_ + k + i * 8 < p.depth);
    }
  }

  /// The next tile of this CTA.
  struct Next {
    int record;
    int column_tile;
    int expert;
    int row;   ///< first row, in expert order
    int rows;  ///< rows of the expert in the tile; 0 or less past the last tile
  };

  /// A TileRecord; past the last record it has no rows.
  __device__ __forceinline__ int4 record_of(const Params& p, int record) const {
    return record < records_ ? reinterpret_cast<const int4*>(p.records)[record] : int4{};
  }

  /// Sets next_ to a tile of the record `read` (TileRecord). Past the last record read.w is 0, and
  /// the offset is less than (rows / kRecordRows + experts + CTAs) * kRecordRows. That is below
  /// 2^31, because check_row_count() refuses more rows.
  __device__ __forceinline__ void take(int record, int column_tile, const int4& read) {
    const int offset = (record - read.w) * kRecordRows;
    next_ = {record, column_tile, read.x, read.y + offset, min(kTileRows, read.z - offset)};
  }

  struct Place {
    int record;
    int column_tile;
  };
  /// The position of this CTA's tile after next_.
  __device__ __forceinline__ Place after(const Params& p) const {
    Place place{next_.record + p.records_apart, next_.column_tile + p.column_tiles_apart};
    if (place.column_tile >= p.column_tiles) {
      place.column_tile -= p.column_tiles;
      place.record++;
    }
    return place;
  }

  /// The position of the tile before next_.
  __device__ __forceinline__ Place current(const Params& p) const {
    const int carry = next_.column_tile < p.column_tiles_apart ? 1 : 0;
    return {next_.record - p.records_apart - carry,
            next_.column_tile - p.column_tiles_apart + carry * p.column_tiles};
  }

  /// Loads the record of the tile after next_. With packed weights no registers are free for it, so
  /// that it is loaded when a tile begins.
  __device__ __forceinline__ void look_ahead(const Params& p) {
    if constexpr (!kIsPacked) ahead_ = record_of(p, after(p).record);
  }

  /// Looks up the rows that the next tile gathers, one tile before they are copied.
  __device__ __forceinline__ void find_sources(const Params& p) {
#pragma unroll
    for (int i = 0; i < kRowsEach; i++) {
      const int own = line() + i * kApart;
      source_[i] = next_.row + own;
      if (p.rows.index != nullptr && own < next_.rows) source_[i] = p.rows.index[next_.row + own];
    }
  }

  /// Begins the next tile and writes its slot. After the last tile the slot has no k tiles.
  __device__ __forceinline__ void open(const Params& p) {
    TileSlot slot{};
    k_ = kNoMore;
    part_ = 0;
    present_ &= kIsPacked ? 1u << kFirstWeight : 0u;  // of codes, which are a k tile ahead
    // With packed weights no registers are free to keep next_ complete.
    if constexpr (kIsPacked) take(next_.record, next_.column_tile, record_of(p, next_.record));
    if (next_.record < records_) {
      k_ = 0;
      slot = {next_.expert, next_.row, next_.rows, next_.column_tile * p.column_step,
              p.k_tiles,    0,         {}};
      open_rows(p, slot.rows);
      if constexpr (!kIsPacked) open_weights(p, slot.expert, slot.column);
      const Place place = after(p);
      if constexpr (kIsPacked) {
        take(place.record, place.column_tile, record_of(p, place.record));
      } else {
        take(place.record, place.column_tile, ahead_);
      }
      find_sources(p);
      look_ahead(p);
    }
    if (threadIdx.x == 0) tile_slots()[count_ % kTileSlots] = slot;
    count_++;
  }

  __device__ __forceinline__ void open_rows(const Params& p, int rows) {
#pragma unroll
    for (int i = 0; i < kRowsEach; i++) {
      a_[i] = p.rows.data + source_[i] * p.rows.row_bytes + chunk() * 16;
      present_ |= line() + i * kApart < rows ? 1u << i : 0u;
    }
  }

  /// Sets the addresses of the weights to the beginning of a part of K.
  __device__ __forceinline__ void open_weights(const Params& p, int expert, int first_column) {
    if constexpr (kIsPacked) {
      if (!is_low_rank()) return;
      const int first = first_column + half() * p.second_half;
      weights_.open_factor(matrices(p, half()), expert, first);
      present_ |= first + Packed::column() < p.columns ? 1u << kFactor : 0u;
    } else if constexpr (kIsKMajor) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const Matrices& m = matrices(p, half);
        const int column = first_column + half * p.second_half + line();
        b_[half] = m.data + expert * m.expert_bytes + column * m.line_bytes + chunk() * 16;
        apart_[half] = kApart * m.line_bytes;
#pragma unroll
        for (int i = 0; i < kHalf; i++) {
          const bool exists = column + i * kApart < p.columns;
          present_ |= exists ? 1u << (kFirstWeight + half * kHalf + i) : 0u;
        }
      }
    } else {
      const Matrices& m = matrices(p, half());
      const int column =
          first_column + half() * p.second_half + threadIdx.x % (Shape::kColumnChunks / 2) * 8;
      b_[0] = m.data + expert * m.expert_bytes + threadIdx.x / Shape::kColumnChunks * m.line_bytes +
              column * kElementBytes;
      apart_[0] = 8 * m.line_bytes;
      present_ |= column < p.columns ? 1u << kFirstWeight : 0u;
    }
  }

  /// Begins the next part of K of this tile, or the next tile. The tile's expert, first row and
  /// column are found again from next_, the tile after it, because no registers are free for them.
  __device__ __forceinline__ void next_part(const Params& p) {
    const bool low_rank = part_ + 1 >= p.parts;
    if (low_rank && (p.rank == 0 || part_ == kLowRank)) {
      open(p);
      return;
    }
    const auto [record, column_tile] = current(p);
    if (low_rank) {
      const TileRecord& read = p.records[record];
      const int row = read.begin + (record - read.first) * kRecordRows + line();
#pragma unroll
      for (int i = 0; i < kRowsEach; i++) {
        a_[i] = p.inner.data + (row + i * kApart) * p.inner.row_bytes + chunk() * 16;
      }
      part_ = kLowRank;
      k_ = p.depth - p.rank;  // so it reaches p.depth at the end of the term
    } else {
#pragma unroll
      for (int i = 0; i < kRowsEach; i++) a_[i] -= (k_ - p.depth) * kElementBytes;
      part_++;
      k_ = 0;
    }
    open_weights(p, p.records[record].expert, column_tile * p.column_step);
  }

  int records_;
  Next next_;
  int4 ahead_;             // TileRecord of the tile after next_, unless the weights are packed
  int source_[kRowsEach];  // rows that the next tile gathers
  unsigned count_ = 0;
  unsigned present_ = 0;  // a bit for each line that this thread copies: whether it exists
  int k_;
  int part_;
  const std::uint8_t* a_[kRowsEach];
  const std::uint8_t* b_[kIsKMajor ? 2 : 1];  // unless the weights are packed
  std::int64_t apart_[kIsKMajor ? 2 : 1];
  [[no_unique_address]] Packed weights_;
};

}  // namespace sonicmoe::cuda::portable
