// Which tiles a cluster computes. In static order: every `clusters`-th tile. With the dynamic tile
// scheduler: the next tile that no cluster has taken, by an atomic counter in global memory.
// Clusters then compute neighbouring tiles, so that the weights in use stay in L2, and a cluster
// with short tiles computes more of them. A launch without a counter has static order.
//
// The dynamic scheduler is one thread of the cluster's first CTA. It takes an index from the
// counter and stores it by st.async in the tile index queue of every CTA. The readers are the
// threads that load and the warps that multiply. The scheduler is up to kPrefetchDistance tiles
// ahead of them:
//
//   scheduler   takes index 1 | takes index 2 | takes index 3 | ...
//   queue       entry 0       | entry 1       | entry 2       | ...   kQueueEntries, then entry 0
//   readers     tile = index of the cluster   | tile of entry 0 | tile of entry 1 | ...
#pragma once

#include "cuda/hopper/engine/tile.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda {

/// The number of tiles by which the scheduler is ahead of the slowest reader. The smaller this
/// number, the closer together are the tiles that the clusters compute at one time. It may be at
/// most kQueueEntries, because run_scheduler() sends entry i as soon as all readers have read entry
/// i - kPrefetchDistance.
inline constexpr int kPrefetchDistance = 2;

/// The thread that runs the dynamic scheduler.
enum class SchedulerThread {
  kProducer,  ///< in a producer warp that does nothing else
  kConsumer,  ///< in a consumer warp, for producers whose warps all copy
};

/// What reads the queue: one thread, or a warp, of which one lane releases the entries.
enum class QueueReader { kThread, kWarp };

/// The scheduler sends it instead of an index if there are no more tiles.
inline constexpr int kNoTile = -1;

/// `index`, or kNoTile if there is no such tile. The number of tiles is computed at every call,
/// because the callers have no register for it.
template <class Scheduler, TileShape kShape>
__device__ __forceinline__ int tile_or_none(const typename Scheduler::Params& tiles, int index) {
  return index < Scheduler::template count<kShape>(tiles) ? index : kNoTile;
}

/// Iterates over the tiles of a cluster, for one reader.
template <class Scheduler, TileShape kShape, QueueReader kReader>
class TileIterator {
 public:
  using Params = typename Scheduler::Params;
  __device__ __forceinline__ TileIterator(const Cta<kShape>& cta, const Params& tiles)
      : cta_(cta), tiles_(tiles), index_(tile_or_none<Scheduler, kShape>(tiles, cta.cluster())) {}
  __device__ __forceinline__ bool done() const { return index_ == kNoTile; }
  __device__ __forceinline__ int index() const { return index_; }
  /// Indices read from the queue; 0 in static order.
  __device__ __forceinline__ std::uint32_t entries_read() const { return entries_read_; }

  __device__ __forceinline__ void next() {
    if (tiles_.tile_counter == nullptr) {
      index_ = tile_or_none<Scheduler, kShape>(tiles_, index_ + cta_.clusters());
      return;
    }
    const int entry = entries_read_ % kQueueEntries;
    cta_.queue_full(entry).wait(entries_read_ / kQueueEntries & 1);
    index_ = ptx::load_word(cta_.queue_index(entry));
    if constexpr (kReader == QueueReader::kWarp) __syncwarp();
    if (kReader == QueueReader::kThread || (threadIdx.x & 31) == 0) {
      cta_.queue_empty(entry).arrive_at(0);
    }
    entries_read_++;
  }

 private:
  const Cta<kShape>& cta_;
  const Params& tiles_;
  int index_;
  std::uint32_t entries_read_ = 0;
};

/// Stores an index in an entry of every CTA's queue.
template <TileShape kShape>
__device__ __forceinline__ void send_index(const Cta<kShape>& cta, int entry, int index) {
  for (int c = 0; c < kShape.cluster; c++) {
    ptx::post_word(cta.queue_index(entry), cta.queue_full(entry), c, index);
  }
}

/// SchedulerThread::kProducer: the whole work of the scheduler thread.
template <class Scheduler, TileShape kShape>
__device__ __forceinline__ void run_scheduler(const Cta<kShape>& cta,
                                              const typename Scheduler::Params& tiles) {
  RingPosition<kQueueEntries> entry;
  RingPosition<kQueueEntries> oldest;  // entry that may still be unread
  int sent = 0;
  for (int index = tile_or_none<Scheduler, kShape>(tiles, cta.cluster()); index != kNoTile;
       entry.next()) {
    if (sent++ >= kPrefetchDistance) {
      cta.queue_empty(oldest.stage).wait(oldest.parity);
      oldest.next();
    }
    const int taken = static_cast<int>(ptx::count_up(tiles.tile_counter)) + cta.clusters();
    index = tile_or_none<Scheduler, kShape>(tiles, taken);
    send_index(cta, entry.stage, index);
  }
}

/// SchedulerThread::kConsumer: the thread issues the atomic early in a tile and sends its result
/// under the tile's last products, so that it never waits for the atomic. All consumer warps call
/// these functions; only the scheduler thread acts. Which index it sends depends on when the
/// producer needs it (tile t is the t-th tile of the cluster):
///
///   | the producer computes tile t + 1          | before tile 0       | in tile t               |
///   | while it copies tile t                    | the index of tile 1 | the index of tile t + 2 |
///   | after it has copied tile t (RingEpilogue) | none                | the index of tile t + 1 |
template <class Scheduler, TileShape kShape, class CtaType = Cta<kShape>>
class InlineScheduler {
 public:
  using Params = typename Scheduler::Params;
  __device__ __forceinline__ InlineScheduler(const CtaType& cta, const Params& tiles)
      : cta_(cta), tiles_(tiles) {}
  /// Sends index 1. Its entry is free, so this function has no wait: a wait would make the ring
  /// position non-uniform for the compiler (RingPosition::make_uniform()).
  __device__ __forceinline__ void begin() {
    take();
    if (is_scheduler()) send_taken(0);
    __syncwarp();
  }
  /// Issues the atomic and does not wait for its result.
  __device__ __forceinline__ void take() {
    // Set in every thread, or the compiler would keep the previous tile's value alive.
    taken_ = is_scheduler() ? ptx::count_up(tiles_.tile_counter) : 0;
  }
  /// Sends the index that take() got, as entry `t` of the queue.
  __device__ __forceinline__ void send(std::uint32_t t) const {
    if (is_scheduler()) {
      const int entry = t % kQueueEntries;
      cta_.queue_empty(entry).wait((t / kQueueEntries & 1) ^ 1);
      send_taken(entry);
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ bool is_scheduler() const {
    return tiles_.tile_counter != nullptr && threadIdx.x == kWarpgroup && cta_.rank() == 0;
  }
  __device__ __forceinline__ void send_taken(int entry) const {
    const int index = static_cast<int>(taken_) + cta_.clusters();
    send_index(cta_, entry, tile_or_none<Scheduler, kShape>(tiles_, index));
  }

  const CtaType& cta_;
  const Params& tiles_;
  unsigned taken_;
};

}  // namespace sonicmoe::cuda
