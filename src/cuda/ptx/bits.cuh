// Operations on bits that CUDA has no function for.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Two 16-bit numbers to all ones where negative, else zero: a byte permutation that copies signs.
__device__ __forceinline__ std::uint32_t signs_of_halves(std::uint32_t word) {
  std::uint32_t signs;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(word));
  return signs;
}

}  // namespace sonicmoe::cuda::ptx
