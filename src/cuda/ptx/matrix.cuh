// Loads fragments from shared memory.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

}  // namespace sonicmoe::cuda::ptx
