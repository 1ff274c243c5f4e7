// Special registers.
#pragma once

namespace sonicmoe::cuda::ptx {

/// Asked for anew each time: a special register is cheaper than a held one.
__device__ __forceinline__ int lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

}  // namespace sonicmoe::cuda::ptx
