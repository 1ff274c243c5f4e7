// The lane number, and hints to the compiler about the values of registers.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// The lane number, read again at each call: reading the special register is cheaper than keeping
/// the number in a register.
__device__ __forceinline__ int lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// Returns `value`, which must be the same in all lanes. The shuffle shows this to the compiler,
/// which then branches on the value, and computes with it, once for the warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

/// Returns the same value. The compiler cannot compute anything from the result before this call.
/// Without pinned() it moves work out of branches, before the code that should run first.
__device__ __forceinline__ std::uint32_t pinned(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace sonicmoe::cuda::ptx
