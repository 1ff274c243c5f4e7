// Changes the number of registers of a warpgroup's threads.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Set the registers of a thread of this warpgroup to kRegisters: growing takes registers from the
/// CTA's pool, and waits for them if none are free; shrinking returns registers to the pool. Every
/// warp of the warpgroup must execute the call.
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sonicmoe::cuda::ptx
