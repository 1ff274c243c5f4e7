// Programmatic dependent launch (PDL): when a kernel lets the next one start, and what a kernel may
// read before the one before it is complete.
#pragma once

#include "cuda/hopper/engine/staging.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"

namespace sonicmoe::cuda {

/// When a kernel's tiles may begin.
enum class Begins : int {
  kAfterPrevious = 0,  ///< after griddepcontrol.wait
  kIndependent = 1,    ///< at once: no tile reads what the previous kernel writes
  kEarly = 2,          ///< tiles below `early_start_tiles` when the previous kernel has released
                       ///< what they read, the others after griddepcontrol.wait; TmaRows only
};

/// Lets the next kernel start on multiprocessors that this one leaves. In every CTA one thread
/// calls it, or the CTA exits. It waits first: the next kernel may then read all that was written
/// before this one (Begins).
__device__ __forceinline__ void launch_dependents_after_wait() {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
}

/// Counts this CTA as one whose stores so far are in memory, and lets the next kernel start. Called
/// once, by both consumer warpgroups.
template <TileShape kShape>
__device__ __forceinline__ void release_early(const Staging<kShape>& staging, unsigned* count) {
  staging.drain();
  ptx::fence_async();
  sync(NamedBarrier::kEarlyRelease, kConsumers * kWarpgroup);
  if (threadIdx.x == kWarpgroup) {
    ptx::release_one(count);
    ptx::launch_next_kernel();
  }
}

}  // namespace sonicmoe::cuda
