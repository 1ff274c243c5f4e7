// The ring between producers and consumers, seen from one thread.
#pragma once

#include "cuda/hopper/engine/shape.h"
#include "cuda/hopper/ptx/mbarrier.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/lane.cuh"

namespace sonicmoe::cuda {

/// Stage and parity, counted rather than divided: `k % stages` with 3, 5 or 6 stages costs up to a
/// fifth of the tensor throughput (docs/engine.md).
template <int kStages>
struct RingPosition {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  /// The same for all lanes, said so: behind a wait by one thread alone the compiler counts on, and
  /// forms descriptors, in every lane's registers.
  __device__ __forceinline__ void agree() {
    stage = ptx::uniform(stage);
    parity = ptx::uniform(parity);
  }
  /// The stage before this one.
  __device__ __forceinline__ int before() const { return (stage == 0 ? kStages : stage) - 1; }
  /// Past `stages` stages (less than a round) and `rounds` whole rounds (only its parity counts).
  __device__ __forceinline__ void skip(int stages, std::uint32_t rounds) {
    stage += stages;
    parity ^= rounds & 1;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
};

/// What every role of a CTA knows: its shared memory and its place in the cluster and the grid.
template <TileShape kShape>
struct Cta {
  using Layout = SharedLayout<kShape>;
  std::uint32_t base;

  // Read anew where they are used: special registers are cheaper than held ones.
  __device__ __forceinline__ int rank() const { return blockIdx.x % kShape.cluster; }
  __device__ __forceinline__ int cluster() const { return blockIdx.x / kShape.cluster; }
  __device__ __forceinline__ int clusters() const { return gridDim.x / kShape.cluster; }

  __device__ __forceinline__ std::uint32_t a(int stage) const {
    return base + Layout::kA + stage * kShape.a_bytes();
  }
  __device__ __forceinline__ std::uint32_t b(int stage) const {
    return base + Layout::kB + stage * kShape.b_bytes();
  }
  __device__ __forceinline__ ptx::Mbarrier full(int stage) const {
    return ptx::Mbarrier(base + Layout::kFull + stage * 8);
  }
  __device__ __forceinline__ ptx::Mbarrier empty(int stage) const {
    return ptx::Mbarrier(base + Layout::kEmpty + stage * 8);
  }
  __device__ __forceinline__ ptx::Mbarrier slot_full(int slot) const {
    return ptx::Mbarrier(base + Layout::kSlotFull + slot * 8);
  }
  __device__ __forceinline__ ptx::Mbarrier slot_empty(int slot) const {
    return ptx::Mbarrier(base + Layout::kSlotEmpty + slot * 8);
  }
  __device__ __forceinline__ std::uint32_t slot(int slot) const {
    return base + Layout::kSlotWords + slot * 4;
  }
};

/// One warp of the consumers gives a stage back to every CTA that filled it.
template <TileShape kShape>
__device__ __forceinline__ void release_stage(const Cta<kShape>& cta, int stage) {
  const int lane = threadIdx.x & 31;
  if constexpr (kShape.cluster > 1) {
    if (lane < kShape.cluster) cta.empty(stage).arrive_at(lane);
  } else {
    if (lane == 0) cta.empty(stage).arrive();
  }
}

/// From here on the next kernel's CTAs take the room that this one leaves, all before it being
/// complete. Every CTA calls it, or ends.
__device__ __forceinline__ void let_next_begin() {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
}

}  // namespace sonicmoe::cuda
