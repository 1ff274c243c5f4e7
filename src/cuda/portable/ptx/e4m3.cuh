// Conversion of e4m3 codes.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// The values of the codes in the two low bytes, as halves, exactly. From 8.9 on.
__device__ __forceinline__ std::uint32_t halves_of_e4m3(std::uint32_t codes) {
  std::uint32_t halves;
  asm("{\n.reg .b16 low;\ncvt.u16.u32 low, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}\n"
      : "=r"(halves)
      : "r"(codes));
  return halves;
}

}  // namespace sonicmoe::cuda::ptx
