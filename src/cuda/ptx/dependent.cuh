// Programmatic dependent launch (sm_90 and later): a kernel starts while the previous kernel of the
// stream still runs. On earlier GPUs kernels run one after the other and both calls do nothing.
//
// What a kernel may read, for kernels P, W, S that follow each other in a stream, all launched with
// the programmatic attribute; by PTX's chapters on griddepcontrol and on memory synchronization:
//  1. When the wait in W returns, P has completed and its writes are visible to W. W may load them
//     in any way, by ld.global.nc too: no earlier load of W has cached them.
//  2. S starts when every CTA of W has called launch_next_kernel() or has exited. If these calls
//     come after W's wait, S may load P's results without a wait, by ld.global. It may not by
//     ld.global.nc, which the memory model does not cover. Why: P has completed before S starts,
//     and the completion of a task synchronizes with the start of later tasks of its stream; the
//     attribute gives this up only for W, the kernel that S overlaps. If these calls come before
//     W's wait, S may load without a wait only the data that W may load without a wait.
//  3. launch_next_kernel() releases nothing. S may load W's results only after its own wait, or
//     after it has acquired a word that W has released (acquire_word(), release_one()).
//  4. Every kernel waits in at least one CTA before it ends. So a kernel that waits for its
//     predecessor waits for all kernels before it, and rules 1 and 2 hold for all these kernels.
#pragma once

namespace sonicmoe::cuda::ptx {

/// Waits until the kernels before this kernel have completed and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The next kernel may start once every CTA has called this function or has exited.
__device__ __forceinline__ void launch_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace sonicmoe::cuda::ptx
