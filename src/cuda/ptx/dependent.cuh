// Programmatic dependent launch (sm_90 and later): a kernel starts beside the end of the kernel
// before it in the stream. Elsewhere kernels run one after the other and both calls do nothing.
//
// What a kernel may read. P, W, S follow each other in a stream; every kernel is launched with the
// programmatic attribute. The rules are PTX's (griddepcontrol; memory synchronization, API part).
//  1. After wait_for_previous_kernel() in W, P has completed and its writes are visible to W. W
//     may then load them in any way, ld.global.nc included: W has cached nothing of them before.
//  2. S starts only when every CTA of W has called launch_next_kernel() or has exited. If W's CTAs
//     call it after the wait of rule 1, P has completed before S starts. Completion of P
//     synchronizes with the start of S, a later task of the same stream; the attribute gives up
//     this edge only for a kernel that S overlaps, which is W. So S may load P's results without
//     a wait, by ld.global: the memory model leaves ld.global.nc out.
//  3. launch_next_kernel() is no release: S may read what W writes only after its own wait, or
//     after it has acquired a word that W released (acquire_word(), release_one()).
//  4. Every kernel waits in at least one CTA before it ends. So whoever waits for a kernel waits
//     for all kernels before it, and rules 1 and 2 hold for all that precede P.
#pragma once

namespace sonicmoe::cuda::ptx {

/// Until the kernels before this one have completed and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The next kernel may start once every CTA has called this or has exited.
__device__ __forceinline__ void launch_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace sonicmoe::cuda::ptx
