// Loads and stores of shared memory by 32-bit address.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

__device__ __forceinline__ std::int32_t load_word(std::uint32_t address) {
  std::int32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

__device__ __forceinline__ void store_word(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}
__device__ __forceinline__ uint4 load_shared16(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_zero16(std::uint32_t address) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
__device__ __forceinline__ float load_float(std::uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_float(std::uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
/// Stores two floats, 8 bytes aligned.
__device__ __forceinline__ void store_floats(std::uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second)
               : "memory");
}
__device__ __forceinline__ void store_half_word(std::uint32_t address, std::uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

/// Two words, 8 bytes aligned.
__device__ __forceinline__ void load_words(std::uint32_t& low, std::uint32_t& high,
                                           std::uint32_t address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(low), "=r"(high)
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_words(std::uint32_t address, std::uint32_t low,
                                            std::uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}

}  // namespace sonicmoe::cuda::ptx
