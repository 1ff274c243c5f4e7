// The iteration of a consumer warp over the tiles of its cluster. Its state is in shared memory,
// because products and epilogues need the registers.
#pragma once

#include "cuda/hopper/engine/tile_queue.cuh"
#include "cuda/hopper/fp8/params.h"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda {

using Fp8Cta = Cta<kFp8Tile>;

/// The tile iterator of a consumer warp: like TileIterator, but it also stores the current and the
/// next tile.
class ConsumerTiles {
 public:
  __device__ __forceinline__ ConsumerTiles(const Fp8Cta& cta, int first_index)
      : at_(cta.base + Fp8SharedLayout::kSavedTiles +
            (threadIdx.x - kWarpgroup) / 32 * Fp8SharedLayout::kWarpBytes) {
    write(place(), first_index, 0);
    write(place() + 8, 0, 0);
  }

  /// The index read last, or kNoTile: until advance() the next tile, after advance() the current.
  __device__ __forceinline__ int index() const { return ptx::uniform(ptx::load_word(place())); }
  /// Number of indices that have been read from the queue; 0 in static order.
  __device__ __forceinline__ std::uint32_t entries_read() const {
    return ptx::load_word(place() + 4);
  }

  /// Replaces index() by the index of the cluster's following tile, as TileIterator::next() does.
  template <class Scheduler>
  __device__ __forceinline__ void next_index(const Fp8Cta& cta, const RowTilesParams& tiles) {
    if (tiles.tile_counter == nullptr) {
      write(place(), tile_or_none<Scheduler, kFp8Tile>(tiles, index() + cta.clusters()), 0);
      return;
    }
    const std::uint32_t read = entries_read();
    const int entry = read % kQueueEntries;
    cta.queue_full(entry).wait(read / kQueueEntries & 1);
    const int index = ptx::load_word(cta.queue_index(entry));
    write(place(), index, read + 1);
    if ((threadIdx.x & 31) == 0) cta.queue_empty(entry).arrive_at(0);
  }

  __device__ __forceinline__ void save_next(const CtaTile& tile) const {
    write(at_ ^ kBytes, tile.expert, tile.row);
    write((at_ ^ kBytes) + 8, tile.valid_rows, tile.column);
  }
  /// The next tile becomes the current one.
  __device__ __forceinline__ void advance() { at_ ^= kBytes; }
  __device__ __forceinline__ CtaTile current() const {
    const uint4 words = ptx::load_shared16(at_);
    CtaTile tile{};
    tile.expert = static_cast<int>(words.x);
    tile.row = static_cast<int>(words.y);
    tile.valid_rows = static_cast<int>(words.z);
    tile.column = static_cast<int>(words.w);
    return tile;
  }

  /// The mbarrier parity of the epilogue's next input: 0, 1, 0, ...
  __device__ __forceinline__ std::uint32_t next_input_parity() const {
    const std::uint32_t parity = ptx::load_word(place() + 8);
    write(place() + 8, parity ^ 1, 0);
    return parity;
  }

  /// save() and restore() keep a position in the operand pipeline during an epilogue.
  using Ring = RingPosition<kFp8Tile.stages>;
  __device__ __forceinline__ void save(const Ring& ring) const {
    write(place() + kBytes, ring.stage, static_cast<int>(ring.parity));
  }
  __device__ __forceinline__ void restore(Ring& ring) const {
    ring.stage = ptx::load_word(place() + kBytes);
    ring.parity = ptx::load_word(place() + kBytes + 4);
  }

  /// The shared address of the warp's scales of weights.
  __device__ __forceinline__ std::uint32_t weight_scales() const { return place() + 2 * kBytes; }

 private:
  static constexpr std::uint32_t kBytes = Fp8SharedLayout::kSavedBytes;

  __device__ __forceinline__ std::uint32_t place() const {
    return (at_ & ~(2 * kBytes - 1)) + 2 * kBytes;
  }
  /// One lane writes, after all lanes have read the old values.
  static __device__ __forceinline__ void write(std::uint32_t at, int first, int second) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) ptx::store_words(at, first, second);
    __syncwarp();
  }

  std::uint32_t at_;
};

}  // namespace sonicmoe::cuda
