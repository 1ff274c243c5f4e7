// Registers that a warpgroup gives up or takes.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Moves registers between the warpgroups of a CTA; every warp of the warpgroup must execute it.
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace sonicmoe::cuda::ptx
