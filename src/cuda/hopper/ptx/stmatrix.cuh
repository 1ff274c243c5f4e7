// Stores fragments to shared memory.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Stores four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix
/// i / 8.
__device__ __forceinline__ void store_matrices(std::uint32_t address, const std::uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}
/// As store_matrices(), with each matrix transposed.
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t address,
                                                          const std::uint32_t (&m)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
      : "memory");
}

}  // namespace sonicmoe::cuda::ptx
