// Conversions between fp32 and 16-bit elements, which fragments hold in pairs: two in a word.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sonicmoe::cuda {

/// Two elements in a 32-bit word; `low` belongs to the lower column. Conversions to 16 bits round
/// to nearest even.
template <class Element>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&v);
  }
  static __device__ __forceinline__ float low(std::uint32_t v) { return __uint_as_float(v << 16); }
  static __device__ __forceinline__ float high(std::uint32_t v) {
    return __uint_as_float(v & 0xffff0000u);
  }
  /// Both values rounded to the element type, as fp32.
  static __device__ __forceinline__ float2 round(float low, float high) {
    return {__uint_as_float(pack(0.0f, low)), __uint_as_float(pack(0.0f, high))};
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&v);
  }
  static __device__ __forceinline__ float low(std::uint32_t v) {
    return __low2float(*reinterpret_cast<const __half2*>(&v));
  }
  static __device__ __forceinline__ float high(std::uint32_t v) {
    return __high2float(*reinterpret_cast<const __half2*>(&v));
  }
  /// Both values rounded to the element type, as fp32.
  static __device__ __forceinline__ float2 round(float low, float high) {
    return __half22float2(__floats2half2_rn(low, high));
  }
};

}  // namespace sonicmoe::cuda
