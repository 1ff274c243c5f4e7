// Schedulers: which tile is number t, and how a cluster walks through the numbers.
#pragma once

#include <concepts>

#include "cuda/engine/pipeline.cuh"
#include "cuda/engine/records.h"

namespace sonicmoe::cuda {

/// For checking concepts.
inline constexpr TileShape kAnyShape{128, 256, 4, 1, 2, Schedule::kCooperative, Order::kStatic};

/// What one CTA does in a tile of its cluster.
struct Work {
  int expert;
  int row;     ///< in the grouped rows: first of the CTA, or of the expert where rows are K
  int left;    ///< output rows from the CTA's first on; none: the stages are only passed on
  int column;  ///< first output column
  int m;       ///< where rows are K: first output row of the CTA
  int depth;   ///< where rows are K: rows of the expert
  int part;    ///< where rows are K: which of the outputs side by side
  bool alone;  ///< the CTAs of the cluster share no B in this tile
};

/// Tiles over grouped rows (M varies by expert, K is fixed), from the list built on the device.
///
/// In clusters of two, what is numbered are shares: (record, tile of columns), records slowest, two
/// shares a tile. Records 2i and 2i + 1 of an expert form a pair: its tiles give one record to each
/// CTA and share their columns of B. An odd last record has no partner: its tiles give two tiles of
/// columns to the CTAs, each with its own B, so that no CTA idles for want of rows. Where a pair
/// begins at an odd share, its first and its last share are the halves of neighbouring tiles, each
/// with its own B too.
struct RowTiles {
  struct Params {
    const TileRecord* records;
    const std::int32_t* record_count;
    unsigned* counter;          ///< zero before the launch; dynamic order only
    std::int32_t columns;       ///< N
    std::int32_t column_tiles;  ///< tiles along N
    std::int32_t column_step;   ///< output columns of a tile
    std::int32_t k_tiles;       ///< k tiles of one part of K
    std::int32_t k_parts;       ///< 2: K runs through gate, then up
  };

  template <TileShape kShape>
  static __device__ __forceinline__ int count(const Params& p) {
    const int shares = __ldg(p.record_count) * p.column_tiles;
    return (shares + kShape.cluster - 1) / kShape.cluster;
  }
  static constexpr bool kFixedDepth = true;
  static __device__ __forceinline__ int k_tiles(const Params& p, const Work&) {
    return p.k_tiles * p.k_parts;
  }

  template <TileShape kShape>
  static __device__ __forceinline__ Work work(const Params& p, int t, int rank) {
    const int across = p.column_tiles;
    const int share = t * kShape.cluster + rank;
    const int index = static_cast<unsigned>(share) / static_cast<unsigned>(across);
    if (kShape.cluster > 1 && index >= __ldg(p.record_count)) return {0, 0, 0, 0, 0, 0, 0, true};
    const int4 raw = __ldg(reinterpret_cast<const int4*>(p.records) + index);
    const TileRecord record{raw.x, raw.y, raw.z, raw.w};
    int local = index - record.first;
    int n = share - index * across;
    bool alone = true;
    if constexpr (kShape.cluster > 1) {
      const int first = index - (local & 1);  // of the pair, if there is one
      const bool paired = (local & 1) != 0 || (local + 1) * kShape.m < record.rows;
      if (paired) {
        const int begin = first * across;
        const int at = share - begin;
        const int odd = begin & 1;
        alone = odd != 0 && (at == 0 || at == 2 * across - 1);
        n = alone ? 0 : (at + odd) >> 1;
        local = (local & ~1) + (alone ? rank ^ 1 : rank);
      }
    }
    const int offset = local * kShape.m;
    return {record.expert, record.begin + offset, record.rows - offset, n * p.column_step, 0, 0, 0,
            alone};
  }
};

/// Tiles of one matrix an expert, (M, N) with K its rows.
struct ExpertTiles {
  struct Params {
    const ExpertRecord* order;  ///< long experts first; null: as they are numbered
    const std::int32_t* expert_begin;
    const std::int32_t* expert_rows;
    unsigned* counter;  ///< zero before the launch; dynamic order only
    std::int32_t experts;
    std::int32_t rows;          ///< M
    std::int32_t columns;       ///< N, of one part
    std::int32_t row_tiles;     ///< of a cluster, along M
    std::int32_t column_tiles;  ///< along N, of one part
    std::int32_t column_step;
    std::int32_t parts;  ///< outputs of the same rows side by side along N: gate and up
  };
  static constexpr bool kFixedDepth = false;

  template <TileShape kShape>
  static __device__ __forceinline__ int count(const Params& p) {
    return p.experts * p.row_tiles * p.column_tiles * p.parts;
  }
  static __device__ __forceinline__ int k_tiles(const Params&, const Work& work) {
    return (work.depth + kDepth - 1) / kDepth;
  }
  /// Columns fastest: neighbours share the gathered rows, which are the dearer operand. A tile runs
  /// through all rows of its expert, so that a long expert taken late would leave the others
  /// waiting.
  template <TileShape kShape>
  static __device__ __forceinline__ Work work(const Params& p, int t, int rank) {
    const unsigned across = static_cast<unsigned>(p.column_tiles * p.parts);
    const unsigned line = static_cast<unsigned>(t) / across;
    const int n = t - line * across;
    const unsigned index = line / static_cast<unsigned>(p.row_tiles);
    const int m = (line - index * p.row_tiles) * kShape.cluster_rows() + rank * kShape.m;
    Work work{};
    if (p.order != nullptr) {
      const int4 record = __ldg(reinterpret_cast<const int4*>(p.order) + index);
      work.expert = record.x;
      work.row = record.y;
      work.depth = record.z;
    } else {
      work.expert = index;
      work.row = __ldg(p.expert_begin + index);
      work.depth = __ldg(p.expert_rows + index);
    }
    work.left = p.rows - m;
    work.part = n >= p.column_tiles ? 1 : 0;
    work.column = (n - work.part * p.column_tiles) * p.column_step;
    work.m = m;
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

/// Who draws tile numbers in dynamic order.
enum class Drawer { kProducer, kConsumer };

/// Who walks: a single thread, or a warp of which one lane speaks for all.
enum class Walker { kThread, kWarp };

/// The walk through a cluster's tiles.
template <TileShape kShape, Walker kWalker>
class TileStream {
 public:
  __device__ __forceinline__ TileStream(const Cta<kShape>& cta, int count)
      : cta_(cta), count_(count), tile_(cta.cluster()) {}
  __device__ __forceinline__ bool done() const { return tile_ >= count_; }
  __device__ __forceinline__ int tile() const { return tile_; }
  /// How many tiles came before; in dynamic order only.
  __device__ __forceinline__ std::uint32_t taken() const { return taken_; }

  __device__ __forceinline__ void next() {
    if constexpr (kShape.order == Order::kStatic) {
      tile_ += cta_.clusters();
    } else {
      const int slot = taken_ % kSlots;
      cta_.slot_full(slot).wait_cluster(taken_ / kSlots & 1);
      tile_ = ptx::load_word(cta_.slot(slot));
      if constexpr (kWalker == Walker::kWarp) __syncwarp();
      if (kWalker == Walker::kThread || (threadIdx.x & 31) == 0) {
        cta_.slot_empty(slot).arrive_at(0);
      }
      taken_++;
    }
  }

 private:
  const Cta<kShape>& cta_;
  int count_;
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
template <TileShape kShape>
__device__ __forceinline__ void draw_tiles(const Cta<kShape>& cta, int count, unsigned* counter) {
  RingPosition<kSlots> position;
  RingPosition<kSlots> oldest;  // that may still be unread
  int posted = 0;
  for (int tile = cta.cluster(); tile < count; position.next()) {
    if (posted++ >= kDrawnAhead) {
      cta.slot_empty(oldest.stage).wait_cluster(oldest.parity);
      oldest.next();
    }
    tile = static_cast<int>(atomicAdd(counter, 1u)) + cta.clusters();
    post_tile(cta, position.stage, tile);
  }
}

/// The same beside the products, for producers whose warps all load: a consumer thread of rank 0
/// calls post(t) at the beginning of its t-th tile. That posts the number of tile t + 2, drawn a
/// tile ago, and draws another, so that the counter's latency passes under products.
template <TileShape kShape>
class TileDraw {
 public:
  __device__ __forceinline__ explicit TileDraw(const Cta<kShape>& cta) : cta_(cta) {}
  /// Before the first tile: posts the number of tile 1.
  __device__ __forceinline__ void start(unsigned* counter) {
    drawn_ = atomicAdd(counter, 1u);
    put(0, counter);
  }
  __device__ __forceinline__ void post(std::uint32_t t, unsigned* counter) { put(t + 1, counter); }

 private:
  __device__ __forceinline__ void put(std::uint32_t use, unsigned* counter) {
    const int slot = use % kSlots;
    cta_.slot_empty(slot).wait_cluster((use / kSlots & 1) ^ 1);
    post_tile(cta_, slot, static_cast<int>(drawn_) + cta_.clusters());
    drawn_ = atomicAdd(counter, 1u);
  }

  const Cta<kShape>& cta_;
  unsigned drawn_ = 0;
};

}  // namespace sonicmoe::cuda
