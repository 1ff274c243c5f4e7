// Special registers, and what all lanes of a warp agree on.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Asked for anew each time: a special register is cheaper than a held one.
__device__ __forceinline__ int lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// A value that all lanes have, said so: the compiler branches on it, and counts with it, once for
/// the warp.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

/// The value, of which nothing is computed ahead of here: compilers work beforehand through what
/// stands in a branch.
__device__ __forceinline__ std::uint32_t pinned(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

}  // namespace sonicmoe::cuda::ptx
