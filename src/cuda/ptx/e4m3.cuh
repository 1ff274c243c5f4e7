// Conversions between fp32 and e4m3fn codes, two or four values at once. The first value has the
// lowest byte.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// The codes of two values, rounded to the nearest e4m3 value, ties to even. NaN becomes the NaN
/// code. Magnitudes above 448, also infinity, become 448 and keep their sign.
__device__ __forceinline__ std::uint32_t to_e4m3(float low, float high) {
  std::uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}
/// The codes of four values; `a` has the lowest byte.
__device__ __forceinline__ std::uint32_t to_e4m3(float a, float b, float c, float d) {
  std::uint32_t codes;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\nmov.b32 %0, {low, high};\n}\n"
      : "=r"(codes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return codes;
}
/// The values of four codes, exactly.
__device__ __forceinline__ void from_e4m3(float2& first, float2& second, std::uint32_t codes) {
  __half2 halves[2];
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
      : "=r"(reinterpret_cast<std::uint32_t&>(halves[0])),
        "=r"(reinterpret_cast<std::uint32_t&>(halves[1]))
      : "r"(codes));
  first = __half22float2(halves[0]);
  second = __half22float2(halves[1]);
}

}  // namespace sonicmoe::cuda::ptx
