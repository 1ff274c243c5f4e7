// The operand pipeline between the producer and the consumers: a ring of stages in shared memory.
//
// The life of one stage, to the right ("full" and "empty" are its mbarriers; loads are by TMA or,
// where A is gathered, by cp.async):
//
//   producer    wait empty, issue loads |                      |                 | wait empty, ...
//   loads                               | write A and B, full  |                 |
//   consumers                           | wait full            | wgmma, k tile t | arrive at empty
//
// A consumer keeps the wgmma of one k tile in flight: it issues the wgmma of k tile t, waits until
// the wgmma of t - 1 are complete and only then releases the stage of t - 1.
#pragma once

#include "cuda/hopper/engine/barriers.cuh"
#include "cuda/hopper/engine/shape.h"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace sonicmoe::cuda {

/// A thread's position in a ring: the stage, and the parity of the phase that it waits for next.
/// next() increments the stage and compares it with kStages. Computing `k % stages` instead costs
/// up to a fifth of the throughput of the tensor cores (3, 5 or 6 stages, H200).
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
  /// Tells the compiler that all lanes have the same position. After a branch in which one thread
  /// waits, the compiler does not know this, and would keep the position and the wgmma descriptors
  /// in registers of every lane instead of uniform registers.
  __device__ __forceinline__ void make_uniform() {
    stage = ptx::uniform(stage);
    parity = ptx::uniform(parity);
  }
  __device__ __forceinline__ int previous_stage() const {
    return (stage == 0 ? kStages : stage) - 1;
  }
  /// Moves the position forward by `rounds` whole rounds of the ring plus `stages` (fewer than
  /// kStages) stages.
  __device__ __forceinline__ void skip(int stages, std::uint32_t rounds) {
    stage += stages;
    parity ^= rounds & 1;
    if (stage >= kStages) {
      stage -= kStages;
      parity ^= 1;
    }
  }
};

/// Addresses in the CTA's shared memory, the CTA's rank in its cluster, and the cluster's number.
template <TileShape kShape>
struct Cta {
  using Layout = SharedLayout<kShape>;
  std::uint32_t base;

  // Not stored: reading the special register at every use costs less than a register for its value.
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
  __device__ __forceinline__ ptx::Mbarrier queue_full(int entry) const {
    return ptx::Mbarrier(base + Layout::kQueueFull + entry * 8);
  }
  __device__ __forceinline__ ptx::Mbarrier queue_empty(int entry) const {
    return ptx::Mbarrier(base + Layout::kQueueEmpty + entry * 8);
  }
  __device__ __forceinline__ std::uint32_t queue_index(int entry) const {
    return base + Layout::kQueueIndex + entry * 4;
  }
};

/// Releases a stage to the producers of both CTAs, because each of them loads a part of B into the
/// stages of both: lane i arrives at `empty` of CTA i. Every consumer warp calls it, after it has
/// read the stage.
template <TileShape kShape>
__device__ __forceinline__ void release_stage(const Cta<kShape>& cta, int stage) {
  const int lane = threadIdx.x & 31;
  if constexpr (kShape.cluster > 1) {
    if (lane < kShape.cluster) cta.empty(stage).arrive_at(lane);
  } else {
    if (lane == 0) cta.empty(stage).arrive();
  }
}

}  // namespace sonicmoe::cuda
