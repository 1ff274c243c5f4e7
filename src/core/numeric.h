// Conversions between fp32 and 16-bit floats: round to nearest, ties to even; NaN stays NaN.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe {

struct BF16 {
  std::uint16_t bits;
};
struct F16 {
  std::uint16_t bits;
};

inline float to_float(BF16 v) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(v.bits) << 16);
}

inline BF16 to_bf16(float v) {
  const auto u = std::bit_cast<std::uint32_t>(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

inline float to_float(F16 v) {
  const std::uint32_t sign = static_cast<std::uint32_t>(v.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (v.bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = v.bits & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  }
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -magnitude : magnitude;
}

inline F16 to_f16(float v) {
  const auto u = std::bit_cast<std::uint32_t>(v);
  const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  const std::uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // >= 65520
  if (magnitude < 0x38800000u) {  // below the smallest normal: let the fp32 adder round
    const float rounded = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(rounded) & 0x7ffu))};
  }
  const std::uint32_t odd = (magnitude >> 13) & 1u;
  return {static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13))};
}

/// Rounds fp32 to the type T.
template <class T>
T from_float(float v);
template <>
inline BF16 from_float<BF16>(float v) {
  return to_bf16(v);
}
template <>
inline F16 from_float<F16>(float v) {
  return to_f16(v);
}
template <>
inline float from_float<float>(float v) {
  return v;
}

inline float to_float(float v) { return v; }

}  // namespace sonicmoe
