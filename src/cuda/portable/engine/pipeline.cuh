// The ring of pipeline stages between copies and products.
//
// A stage has two mbarriers. A phase of `full` completes when the copies of all threads have
// landed, a phase of `empty` when all warps have read the stage. While a warp multiplies k tile i,
// it copies k tile i + kStages - 1 to the stage of k tile i - 1. Before it copies, it waits until
// all warps have read k tile i - 1. So warps drift apart by at most one k tile.
#pragma once

#include <cstdint>

#include "cuda/portable/ptx/barrier.cuh"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {

template <class Shape>
class Pipeline {
 public:
  __device__ __forceinline__ Pipeline(std::uint32_t barriers, std::uint32_t first_stage)
      : barriers_(barriers), first_stage_(first_stage) {}

  /// `full` expects one arrival of each thread, when its copies have landed, and one more of each
  /// of `writers` threads. The latter makes visible to the other threads what has been written: the
  /// tile slot by thread 0, and unpacked weights by all warps.
  __device__ __forceinline__ void init(int writers) const {
    for (int i = 0; i < kStages; i++) {
      full(i).init(Shape::kThreads + writers);
      empty(i).init(Shape::kWarps);
    }
  }

  __device__ __forceinline__ ptx::RingBarrier full(int stage) const {
    return ptx::RingBarrier(barriers_ + stage * 2 * ptx::RingBarrier::kBytes);
  }
  __device__ __forceinline__ ptx::RingBarrier empty(int stage) const {
    return ptx::RingBarrier(barriers_ + (stage * 2 + 1) * ptx::RingBarrier::kBytes);
  }
  __device__ __forceinline__ std::uint32_t address(int stage) const {
    return first_stage_ + stage * Shape::kBytes;
  }

 private:
  static_assert(kStages * 2 * ptx::RingBarrier::kBytes <= kBarrierBytes);

  std::uint32_t barriers_;
  std::uint32_t first_stage_;
};

/// A stage and the parity of its mbarrier phase, which is 0 in the first round.
struct RingPosition {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

}  // namespace sonicmoe::cuda::portable
