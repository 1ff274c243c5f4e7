// The mbarriers of a CTA, and positions in the rings that they guard.
//
//   name        where      arrivals in a phase               who waits   what it orders
//   full[s]     even CTA   1, and the bytes of both CTAs;    products    loads before products
//                          of codes 1 more of each CTA
//   empty[s]    each CTA   1, by commit                      loads       products before new loads
//   d_full[a]   each CTA   1, by commit                      epilogue    products before reads of D
//   d_empty[a]  even CTA   1 of each epilogue warp of both   products    reads of D before products
//   queue_full[e]   each CTA   1, and the bytes of an index  readers     the index before its reads
//   queue_empty[e]  odd CTA    1 of each reader              scheduler   reads before the next
//   index
//
// The cluster barrier runs twice: after the mbarriers are initialised, and before tensor memory is
// freed and a CTA exits, because the other CTA may still arrive at its mbarriers and multiply its
// operands.
#pragma once

#include "cuda/blackwell/params.h"
#include "cuda/blackwell/ptx/pair_copy.cuh"
#include "cuda/blackwell/shape.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/system.cuh"

namespace sonicmoe::cuda::blackwell {

/// An mbarrier whose waits may have a time limit.
class Barrier : public ptx::Mbarrier {
 public:
  __device__ __forceinline__ Barrier(std::uint32_t address, const WaitLimit& limit)
      : Mbarrier(address), limit_(limit) {}

  /// False if the limit is exceeded. What the caller waits for may then still happen, or never.
  [[nodiscard]] __device__ __forceinline__ bool wait(std::uint32_t parity) const {
    if (limit_.exceeded == nullptr) {
      Mbarrier::wait(parity);
      return true;
    }
    const std::uint64_t begin = ptx::nanoseconds();
    volatile std::int32_t* const exceeded = limit_.exceeded;
    // Asked first: behind a phase that never completes, the wait for the next one would succeed.
    while (*exceeded == 0) {
      if (ptx::try_wait(*this, parity)) return true;
      if (ptx::nanoseconds() - begin > limit_.nanoseconds) *exceeded = 1;
    }
    return false;
  }

 private:
  const WaitLimit& limit_;
};

/// Shared memory of a CTA, by address.
struct Cta {
  std::uint32_t base;
  int rank;
  const WaitLimit& limit;

  __device__ __forceinline__ std::uint32_t a(int stage) const { return base + stage * kStageBytes; }
  __device__ __forceinline__ std::uint32_t b(int stage) const { return a(stage) + kStageBytesA; }
  /// The chunks of scales of a stage.
  __device__ __forceinline__ std::uint32_t chunks(int stage) const {
    return base + kChunksAt + stage * kStageChunks * kChunkBytes;
  }
  __device__ __forceinline__ std::uint32_t staging(int warp) const {
    return base + kStagingAt + warp * kStagingBuffers * kStagingBytes;
  }
  __device__ __forceinline__ Barrier full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ Barrier empty(int stage) const { return barrier(kStages + stage); }
  __device__ __forceinline__ Barrier d_full(int accumulator) const {
    return barrier(2 * kStages + accumulator);
  }
  __device__ __forceinline__ Barrier d_empty(int accumulator) const {
    return barrier(2 * kStages + kAccumulators + accumulator);
  }
  __device__ __forceinline__ ptx::Mbarrier queue_full(int entry) const {
    return barrier(2 * kStages + 2 * kAccumulators + entry);
  }
  __device__ __forceinline__ ptx::Mbarrier queue_empty(int entry) const {
    return barrier(2 * kStages + 2 * kAccumulators + kQueueEntries + entry);
  }
  __device__ __forceinline__ std::uint32_t queue_index(int entry) const {
    return base + kQueueAt + entry * 4;
  }
  __device__ __forceinline__ std::uint32_t tensor_slot() const { return base + kTensorSlotAt; }

  /// One thread initialises all barriers. `loaders`: arrivals at `full`; `readers`: of the queue.
  __device__ __forceinline__ void init_barriers(int loaders, int readers) const {
    for (int s = 0; s < kStages; s++) {
      full(s).init(loaders);
      empty(s).init(1);
    }
    for (int i = 0; i < kAccumulators; i++) {
      d_full(i).init(1);
      d_empty(i).init(kCtas * kEpilogueWarps);
    }
    for (int e = 0; e < kQueueEntries; e++) {
      queue_full(e).init(1);
      queue_empty(e).init(readers);
    }
    ptx::fence_barrier_init();
  }

 private:
  __device__ __forceinline__ Barrier barrier(int i) const {
    return Barrier(base + kBarriersAt + i * Barrier::kBytes, limit);
  }
};

/// A position in a ring of kCount entries, and the parity of its phase.
template <int kCount>
struct Ring {
  int at = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void next() {
    if (++at == kCount) {
      at = 0;
      parity ^= 1;
    }
  }
};
using StageRing = Ring<kStages>;

/// A commit of the last products may still arrive at `empty`. Waits for it, because a CTA must not
/// end before. `ring` is behind the last stage. The wait for a stage that was never used succeeds
/// at once.
__device__ __forceinline__ void wait_for_last_products(const Cta& cta, StageRing ring) {
#pragma unroll 1
  for (int s = 0; s < kStages; s++) {
    if (!cta.empty(ring.at).wait(ring.parity ^ 1)) return;
    ring.next();
  }
}

}  // namespace sonicmoe::cuda::blackwell
