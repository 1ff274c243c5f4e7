// The lane number, and hints about values that all lanes share.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// The lane, read anew at each call: a special register is cheaper than a register that is held.
__device__ __forceinline__ int lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// A value that is the same in all lanes. From the shuffle the compiler knows this: it then
/// branches on the value, and computes with it, once for the warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

/// The same value. The compiler cannot compute anything from the result before this point. Without
/// pinned() it moves work out of branches, ahead of the code that should run first.
__device__ __forceinline__ std::uint32_t pinned(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace sonicmoe::cuda::ptx
