// Which tiles a pair computes. In static order: every `pairs`-th tile. With a counter: the next
// tile that no pair has taken. Pairs then compute neighbouring tiles, so that the weights in use
// stay in L2, and a pair with short tiles computes more of them.
//
// With a counter one thread of the odd CTA, the scheduler, takes indices from it and stores them in
// the queues of both CTAs. It ends with the first index that is no tile.
#pragma once

#include "cuda/blackwell/engine/barriers.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda::blackwell {

inline constexpr int kSchedulerCta = 1;

__device__ __forceinline__ int pair_index() { return static_cast<int>(blockIdx.x) / kCtas; }
__device__ __forceinline__ int pair_count() { return static_cast<int>(gridDim.x) / kCtas; }

/// What reads the queue: one thread, or a whole warp.
enum class QueueReader { kThread, kWarp };

/// The tile indices of this pair, for one reader.
class TileIndices {
 public:
  __device__ __forceinline__ TileIndices(const Cta& cta, const unsigned* counter,
                                         QueueReader reader)
      : cta_(cta), is_static_(counter == nullptr), reader_(reader) {}

  __device__ __forceinline__ int next() {
    if (last_ < 0) {
      last_ = pair_index();
    } else if (is_static_) {
      last_ += pair_count();
    } else {
      last_ = take();
    }
    return last_;
  }

 private:
  __device__ __forceinline__ int take() {
    cta_.queue_full(entry_.at).wait(entry_.parity);
    const int index = ptx::load_word(cta_.queue_index(entry_.at));
    if (reader_ == QueueReader::kWarp) __syncwarp();
    if (reader_ == QueueReader::kThread || ptx::lane() == 0) {
      cta_.queue_empty(entry_.at).arrive_at(kSchedulerCta);
    }
    entry_.next();
    return index;
  }

  const Cta& cta_;
  bool is_static_;
  QueueReader reader_;
  int last_ = -1;
  Ring<kQueueEntries> entry_;
};

/// The scheduler, one thread. `count` is the number of tiles.
__device__ __forceinline__ void schedule_tiles(const Cta& cta, unsigned* counter, int count) {
  Ring<kQueueEntries> entry;
  for (int index = pair_index(); index < count; entry.next()) {
    cta.queue_empty(entry.at).wait(entry.parity ^ 1);
    index = static_cast<int>(ptx::count_up(counter)) + pair_count();
    for (int c = 0; c < kCtas; c++) {
      ptx::post_word(cta.queue_index(entry.at), cta.queue_full(entry.at), c, index);
    }
  }
}

}  // namespace sonicmoe::cuda::blackwell
