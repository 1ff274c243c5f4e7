// Addresses of shared memory, which are 32 bits wide in all kernels, and pointers to global memory
// whose arithmetic the compiler must not rearrange.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Adds kBytes to a pointer, in place. After an addition in C++ ptxas may keep the two 32-bit
/// halves of the sum in registers that are not an aligned pair, and copy them to a pair at each
/// use.
template <int kBytes>
__device__ __forceinline__ void advance(const std::uint8_t*& pointer) {
  asm volatile("add.s64 %0, %0, %1;" : "+l"(pointer) : "n"(kBytes));
}

/// Returns the same pointer, but hides its value from the compiler, which then cannot rearrange
/// arithmetic across this call.
__device__ __forceinline__ const std::uint8_t* opaque(const std::uint8_t* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

/// base + row * row_bytes in one instruction, which the compiler does not move past other volatile
/// statements.
__device__ __forceinline__ const std::uint8_t* row_address(const std::uint8_t* base, int row,
                                                           int row_bytes) {
  const std::uint8_t* at;
  asm volatile("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(row_bytes), "l"(base));
  return at;
}

}  // namespace sonicmoe::cuda::ptx
