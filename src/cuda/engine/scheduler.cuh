// Schedulers: which tile is number t, and how a cluster walks through the numbers.
#pragma once

#include <concepts>

#include "cuda/engine/pipeline.cuh"
#include "cuda/engine/records.h"

namespace sonicmoe::cuda {

/// One tile of a cluster.
struct Work {
  int expert;
  int row;     ///< in the grouped rows: first of the tile, or of the expert where rows are K
  int left;    ///< output rows from the tile's first on
  int column;  ///< first output column
  int m;       ///< where rows are K: first output row
  int depth;   ///< where rows are K: rows of the expert
  int part;    ///< where rows are K: which of the outputs side by side
};

/// Tiles over grouped rows (M varies by expert, K is fixed), from the list built on the device.
struct RowTiles {
  struct Params {
    const TileRecord* records;
    const std::int32_t* record_count;
    unsigned* counter;          ///< zero before the launch; dynamic order only
    std::int32_t column_tiles;  ///< tiles along N
    std::int32_t column_step;   ///< output columns of a tile
    std::int32_t k_tiles;       ///< k tiles of one part of K
    std::int32_t k_parts;       ///< 2: K runs through gate, then up
  };

  static __device__ __forceinline__ int count(const Params& p) {
    return __ldg(p.record_count) * p.column_tiles;
  }
  static constexpr bool kFixedDepth = true;
  static __device__ __forceinline__ int k_tiles(const Params& p, const Work&) {
    return p.k_tiles * p.k_parts;
  }

  template <TileShape kShape>
  static __device__ __forceinline__ Work work(const Params& p, int t) {
    const auto across = static_cast<unsigned>(p.column_tiles);
    const int index = static_cast<unsigned>(t) / across;
    const int n = t - index * across;
    const int4 raw = __ldg(reinterpret_cast<const int4*>(p.records) + index);
    const TileRecord record{raw.x, raw.y, raw.z, raw.w};
    const int offset = (index - record.first) * kShape.cluster_rows();
    return {record.expert, record.begin + offset, record.rows - offset, n * p.column_step, 0, 0, 0};
  }
};

/// Tiles of one matrix an expert, (M, N) with K its rows.
struct ExpertTiles {
  struct Params {
    const std::int32_t* expert_begin;
    const std::int32_t* expert_rows;
    std::int32_t experts;
    std::int32_t rows;          ///< M
    std::int32_t row_tiles;     ///< of a cluster, along M
    std::int32_t column_tiles;  ///< along N, of one part
    std::int32_t column_step;
    std::int32_t parts;  ///< outputs of the same rows side by side along N: gate and up
  };
  static constexpr bool kFixedDepth = false;

  static __device__ __forceinline__ int count(const Params& p) {
    return p.experts * p.row_tiles * p.column_tiles * p.parts;
  }
  static __device__ __forceinline__ int k_tiles(const Params&, const Work& work) {
    return (work.depth + kDepth - 1) / kDepth;
  }
  /// Columns fastest: neighbours share the gathered rows, which are the dearer operand.
  template <TileShape kShape>
  static __device__ __forceinline__ Work work(const Params& p, int t) {
    const unsigned across = static_cast<unsigned>(p.column_tiles * p.parts);
    const unsigned line = static_cast<unsigned>(t) / across;
    const int n = t - line * across;
    const unsigned expert = line / static_cast<unsigned>(p.row_tiles);
    const int m = (line - expert * p.row_tiles) * kShape.cluster_rows();
    Work work{};
    work.expert = expert;
    work.row = __ldg(p.expert_begin + expert);
    work.left = p.rows - m;
    work.part = n >= p.column_tiles ? 1 : 0;
    work.column = (n - work.part * p.column_tiles) * p.column_step;
    work.m = m;
    work.depth = __ldg(p.expert_rows + expert);
    return work;
  }
};

template <class S>
concept TileScheduler = requires(const typename S::Params& p, int t) {
  { S::count(p) } -> std::same_as<int>;
  { S::k_tiles(p, Work{}) } -> std::same_as<int>;
  { S::kFixedDepth } -> std::convertible_to<bool>;
  { S::template work<TileShape{128, 256, 4, 1, 2, Schedule::kCooperative, Order::kStatic}>(p, t) };
};

inline constexpr int kSlots = 2;  // tile numbers that the counter runs ahead

/// The walk of one thread (producer) or one warp (consumer) through its cluster's tiles.
template <TileShape kShape>
class TileStream {
 public:
  __device__ __forceinline__ TileStream(const Cta<kShape>& cta, int count)
      : cta_(cta), count_(count), tile_(cta.cluster()) {}
  __device__ __forceinline__ bool done() const { return tile_ >= count_; }
  __device__ __forceinline__ int tile() const { return tile_; }

  __device__ __forceinline__ void next() {
    if constexpr (kShape.order == Order::kStatic) {
      tile_ += cta_.clusters();
    } else {
      cta_.slot_full(taken_ & 1).wait_cluster(taken_ >> 1 & 1);
      tile_ = ptx::load_word(cta_.slot(taken_ & 1));
      release();
      taken_++;
    }
  }

 private:
  __device__ __forceinline__ void release() const {
    // The producer is a single thread; of a consumer warp, one lane speaks for all.
    const bool producer = threadIdx.x < kWarpgroup;
    if (!producer) __syncwarp();
    if (producer || (threadIdx.x & 31) == 0) cta_.slot_empty(taken_ & 1).arrive_at(0);
  }

  const Cta<kShape>& cta_;
  int count_;
  int tile_;
  std::uint32_t taken_ = 0;  // slots read: bit 0 is the slot, bit 1 its parity
};

/// Arrivals that free a slot: the loading thread and eight consumer warps of every CTA.
constexpr int slot_readers(const TileShape& shape) { return (1 + 8) * shape.cluster; }

/// The scheduler warp (one thread of rank 0): draws numbers and posts them to the whole cluster.
template <TileShape kShape>
__device__ __forceinline__ void draw_tiles(const Cta<kShape>& cta, int count, unsigned* counter) {
  RingPosition<kSlots> position;
  for (int tile = cta.cluster(); tile < count; position.next()) {
    cta.slot_empty(position.stage).wait_cluster(position.parity ^ 1);
    tile = static_cast<int>(atomicAdd(counter, 1u)) + cta.clusters();
    for (int c = 0; c < kShape.cluster; c++) {
      ptx::post_word(cta.slot(position.stage), cta.slot_full(position.stage), c, tile);
    }
  }
}

}  // namespace sonicmoe::cuda
