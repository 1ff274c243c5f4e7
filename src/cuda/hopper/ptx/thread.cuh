// The numbers of the thread and of the CTA. asm volatile reads them again at each call, so the
// compiler recomputes values that depend on them for each tile, instead of keeping them in
// registers between tiles.
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
