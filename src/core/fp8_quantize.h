// The quantiser of Precision::kFp8. Host and device compile the same source, so the CPU and the GPU
// store the same codes and scales.
//
// A block (1 x 128 of a row, 128 x 128 of a weight matrix) has one scale s: the smallest power of
// two >= 2^-126 for which the largest finite magnitude in the block is at most 448 s, or 1 if that
// magnitude is 0. The code of v is v/s rounded to the nearest e4m3 value, ties to even. NaN and
// infinities get the NaN code and are ignored when the scale is chosen.
//
// v is a bf16 value, so v/s is exact in fp32, or so small that its code is 0. code * s is exact in
// bf16. This holds even where s is so small that codes times s are closer together than bf16's
// subnormal numbers: there v/s is an e4m3 value already, so nothing is rounded. The one exception
// is |v| >= 248 * 2^120: its code times s is 2^128, which is infinite in fp32 and bf16.
#pragma once

#include <cstdint>

#include "core/selection_key.h"

namespace sonicmoe::fp8 {

inline constexpr std::uint8_t kNaNCode = 0x7f;
inline constexpr std::uint8_t kLargestCode = 0x7e;  ///< 448

/// The bits of |v| as an integer, which compares as |v| does; 0 for NaN and infinities. The maximum
/// over a block is the argument of scale_of().
SONICMOE_HD std::uint32_t magnitude_of(float v) {
  const std::uint32_t magnitude = key::bits_of(v) & 0x7fffffffu;
  return magnitude < 0x7f800000u ? magnitude : 0u;
}

/// The scale of a block whose maximum of magnitude_of() is `largest`. Because 448 = 1.75 * 2^8, the
/// exponent of the scale is the exponent of the magnitude minus 8, plus 1 if the mantissa of the
/// magnitude exceeds 1.75.
SONICMOE_HD float scale_of(std::uint32_t largest) {
  const std::uint32_t above = (largest & 0x7fffffu) > 0x600000u ? 1u : 0u;
  const std::uint32_t exponent = (largest >> 23) + above;
  const std::uint32_t biased = exponent > 9u ? exponent - 8u : 1u;
  return key::float_of(largest == 0u ? 0x3f800000u : biased << 23);
}

/// 1/scale, which is exact because the scale is a power of two.
SONICMOE_HD float inverse_of(float scale) {
  return key::float_of(0x7f000000u - key::bits_of(scale));
}

/// The e4m3 code nearest to v, ties to even. Magnitudes above 448 get the code of 448, with their
/// sign (saturation). v must not be NaN.
SONICMOE_HD std::uint8_t e4m3_of(float v) {
  const std::uint32_t sign = key::bits_of(v) >> 31 << 7;
  const std::uint32_t magnitude = key::bits_of(v) & 0x7fffffffu;
  std::uint32_t code = kLargestCode;
  if (magnitude < 0x3c800000u) {
    // Below 2^-6 the e4m3 values are the multiples of 2^-9. fp32 values from 2^14 on have the same
    // spacing, so adding 2^14 rounds to a multiple of 2^-9.
    const float shifted = key::add32(key::float_of(magnitude), 0x1p14f);
    code = key::bits_of(shifted) - 0x46800000u;
  } else if (magnitude < 0x43e00000u) {
    const std::uint32_t odd = magnitude >> 20 & 1u;
    code = ((magnitude + 0x7ffffu + odd) >> 20) - (120u << 3);
  }
  return static_cast<std::uint8_t>(sign | code);
}

/// The code of an element v of a block; `inverse` is 1/scale of the block.
SONICMOE_HD std::uint8_t code_of(float v, float inverse) {
  const bool finite = (key::bits_of(v) & 0x7fffffffu) < 0x7f800000u;
  return finite ? e4m3_of(key::mul32(v, inverse)) : kNaNCode;
}

/// The e4m3 value of a code, without the scale.
SONICMOE_HD float value_of(std::uint8_t code) {
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t magnitude = code & 0x7fu;
  if (magnitude == kNaNCode) return key::float_of(0x7fc00000u | sign);
  if (magnitude < 8u) {
    const float value = key::mul32(static_cast<float>(magnitude), 0x1p-9f);
    return sign == 0u ? value : -value;
  }
  return key::float_of(sign | ((magnitude << 20) + (120u << 23)));
}

}  // namespace sonicmoe::fp8
