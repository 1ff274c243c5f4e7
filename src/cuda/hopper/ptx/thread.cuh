// The numbers of the thread and of the CTA, read again at each call (asm volatile). So the compiler
// computes values that depend on them again for each tile, and keeps none in registers between
// tiles.
#pragma once

namespace sonicmoe::cuda::ptx {

__device__ __forceinline__ int thread() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ int cta() {
  int cta;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(cta));
  return cta;
}

}  // namespace sonicmoe::cuda::ptx
