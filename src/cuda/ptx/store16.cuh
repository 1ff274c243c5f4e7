// Stores 16 bytes to shared memory.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

__device__ __forceinline__ void store_shared16(std::uint32_t address, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

}  // namespace sonicmoe::cuda::ptx
