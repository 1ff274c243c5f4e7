// Operations on bits that CUDA has no function for.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Replaces each of two 16-bit numbers by all ones if it is negative, by zero otherwise. One byte
/// permutation that copies the sign bits.
__device__ __forceinline__ std::uint32_t signs_of_halves(std::uint32_t word) {
  std::uint32_t signs;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(word));
  return signs;
}

}  // namespace sonicmoe::cuda::ptx
