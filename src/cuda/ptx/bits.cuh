// Operations on bits that no function of CUDA's names.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Of two 16-bit numbers: all ones where one is negative. A byte permutation that copies signs.
__device__ __forceinline__ std::uint32_t signs_of_halves(std::uint32_t word) {
  std::uint32_t signs;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(word));
  return signs;
}

}  // namespace sonicmoe::cuda::ptx
