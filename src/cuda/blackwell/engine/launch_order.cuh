// Programmatic dependent launch: when a kernel lets the next kernel start, and when its loads
// begin.
#pragma once

#include "cuda/blackwell/params.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda::blackwell {

/// Waits for the previous kernel, then lets the next kernel start. It starts once all CTAs have
/// called this function or ended. Because of the wait it may read the results of all kernels before
/// this one.
__device__ __forceinline__ void launch_dependents_after_wait() {
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
}

/// Whether tiles begin at once. It is false at compile time for epilogues that never do, so their
/// kernels have no code for it.
template <class Epilogue>
__device__ __forceinline__ bool begins_at_once(const LaunchOrder& order) {
  return Epilogue::kMayBeginAtOnce && order.begins == Begins::kIndependent;
}

/// The warps that load call it before their first load.
template <class Epilogue>
__device__ __forceinline__ void begin_loads(const LaunchOrder& order) {
  if (!begins_at_once<Epilogue>(order)) return;
  if (order.arrival != nullptr) {
    // The kernel before has incremented the count, also after a fault: this does not wait long.
    while (ptx::acquire_word(order.arrival) == 0) {
    }
  }
  ptx::fence_async();
}

}  // namespace sonicmoe::cuda::blackwell
