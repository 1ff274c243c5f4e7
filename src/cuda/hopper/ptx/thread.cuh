// The thread number, read anew at each call: values computed from it are then computed again for
// each tile, and occupy no registers between tiles.
#pragma once

namespace sonicmoe::cuda::ptx {

__device__ __forceinline__ int thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

}  // namespace sonicmoe::cuda::ptx
