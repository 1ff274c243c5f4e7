// The thread number, read anew at each call: what is computed from it is not kept in registers from
// tile to tile.
#pragma once

namespace sonicmoe::cuda::ptx {

__device__ __forceinline__ int thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

}  // namespace sonicmoe::cuda::ptx
