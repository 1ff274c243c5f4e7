// Programmatic dependent launch (PDL): when a kernel lets the next one start, and what a kernel may
// read before the one before it is complete.
#pragma once

#include "cuda/hopper/engine/staging.cuh"
#include "cuda/hopper/ptx/tma.cuh"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/global.cuh"

namespace sonicmoe::cuda {

/// When a kernel's tiles may begin. Why that is sound, of kernels L, M, N in stream order:
/// 1. Every CTA of M executes griddepcontrol.wait, then launch_dependents; N starts when all have.
///    PTX: when wait returns, L is complete and its memory operations are performed, and a write is
///    performed when the previous value can no longer be read. So N may read, without a wait of its
///    own, what L and earlier kernels wrote, under two conditions:
///    - not by ld.global.nc (__ldg), which PTX's memory model leaves out: it may return a stale
///      copy. What runs before the wait reads by ld.global.ca (RasterOrder::kGrouped, ExpertTiles,
///      GatherDepth) and cp.async.
///    - by TMA, which is another proxy, only after fence.proxy.async in the thread that loads.
/// 2. launch_dependents orders no memory. N reads nothing that M writes before its own wait, except
///    in kEarly tiles: each CTA of M, when its stores are complete, executes fence.proxy.async and
///    counts itself by red.release.gpu; N's loading thread reads the count by ld.acquire.gpu and
///    executes fence.proxy.async. If the count is not complete, it waits.
/// 3. N waits before it ends: who waits for N then finds L and M complete too.
/// If M launches N before it has waited itself (sums/), "L" is what was complete when M started.
enum class Begins : int {
  kAfterPrevious = 0,  ///< after griddepcontrol.wait
  kIndependent = 1,    ///< at once: no tile reads what the previous kernel writes
  kEarly = 2,          ///< tiles below `early_start_tiles` when the previous kernel has released
                       ///< what they read, the others after griddepcontrol.wait; TmaRows only
};

/// Lets the next kernel start on multiprocessors that this one leaves, when all CTAs have called it
/// or ended. It waits first: the next kernel may then read what was written before this one.
///
///   | this kernel                                | a CTA calls it                                |
///   | kAfterPrevious                             | at its beginning                              |
///   | kAfterPrevious with early_release_tiles    | release_early(): after its last early tile    |
///   | kIndependent                               | after its first tile: the wait is short then  |
///   | kEarly                                     | before its first tile that is not early       |
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
