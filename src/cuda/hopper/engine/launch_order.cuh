// Programmatic dependent launch (PDL): when a kernel lets the next kernel start. Begins (params.h)
// says what a kernel may read while the kernel before it still runs.
#pragma once

#include "cuda/hopper/engine/staging.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

/// Waits for the previous kernel, then lets the next kernel start. Once all CTAs have called this
/// function or ended, the next kernel starts on multiprocessors that this kernel leaves. Because of
/// the wait it may read the results of all kernels before this one.
///
///   | this kernel                                | a CTA calls the function                      |
///   | kAfterPrevious                             | at its beginning                              |
///   | kAfterPrevious with early_release_tiles    | release_early(): after its last early tile    |
///   | kIndependent                               | after its first tile: the wait is short then  |
///   | kEarly                                     | before its first tile that is not early; at   |
///   |                                            | its beginning if the count is incomplete      |
__device__ __forceinline__ void launch_dependents_after_wait() {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
}

/// Waits until this CTA's stores so far are in memory, counts the CTA in `count`, and lets the next
/// kernel start. Called once, by both consumer warpgroups.
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
