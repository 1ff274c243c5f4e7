// Changes the number of registers of a warpgroup's threads.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Both functions set the number of registers of each thread of this warpgroup to kRegisters.
/// grow_registers() takes registers from the CTA's pool, and waits until enough are free.
/// shrink_registers() returns registers to the pool. Every warp of the warpgroup must make the
/// call.
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sonicmoe::cuda::ptx
