// Functions that are one instruction. exp2() and reciprocal() run on the special function unit and
// flush denormals: results below 2^-126 are 0.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// 2^x to 2 ulp.
__device__ __forceinline__ float exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
/// 1/x to 1 ulp.
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

/// Minimum and maximum; NaN if an argument is NaN.
__device__ __forceinline__ float smaller(float x, float y) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}
__device__ __forceinline__ float larger(float x, float y) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

/// For each of two bf16 values, the one with the larger magnitude; its sign has no meaning. NaN is
/// ignored if the other value is a number.
__device__ __forceinline__ std::uint32_t larger_magnitudes(std::uint32_t x, std::uint32_t y) {
  std::uint32_t r;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}

}  // namespace sonicmoe::cuda::ptx
