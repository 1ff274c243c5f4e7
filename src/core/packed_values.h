// The values of packed codes and scales, and the sizes of their buffers. Host and device compile
// the same source, so the CPU and the GPU unpack the same bits. include/sonicmoe/packed.h has the
// formulas.
#pragma once

#include <cstdint>

#include "core/fp8_quantize.h"
#include "core/selection_key.h"
#include "sonicmoe/packed.h"

namespace sonicmoe::packed {

inline constexpr std::int64_t kMXBlock = 32;       ///< elements that share an E8M0 scale
inline constexpr std::int64_t kFP8Block = 128;     ///< rows, and columns, that share a scale
inline constexpr std::int64_t kNestedBlock = 256;  ///< absmax that share a nested scale

/// The values of NF4 codes, those of bitsandbytes.
SONICMOE_HD constexpr float nf4_of(std::uint32_t code) {
  constexpr float kValues[16] = {
      -1.0f,
      -0.6961928009986877f,
      -0.5250730514526367f,
      -0.39491748809814453f,
      -0.28444138169288635f,
      -0.18477343022823334f,
      -0.09105003625154495f,
      0.0f,
      0.07958029955625534f,
      0.16093020141124725f,
      0.24611230194568634f,
      0.33791524171829224f,
      0.44070982933044434f,
      0.5626170039176941f,
      0.7229568362236023f,
      1.0f,
  };
  return kValues[code & 15u];
}

/// The e2m1 value of a code: 1 sign bit, 2 exponent bits with bias 1, 1 mantissa bit.
SONICMOE_HD float e2m1_of(std::uint32_t code) {
  const std::uint32_t sign = (code & 8u) << 28;
  const std::uint32_t magnitude = code & 7u;
  if (magnitude < 2u) return key::float_of(sign | (magnitude == 0u ? 0u : 0x3f000000u));
  return key::float_of(sign | ((magnitude << 22) + (126u << 23)));
}

/// The E8M0 value of a scale: 2^(s - 127), NaN for 255.
SONICMOE_HD float e8m0_of(std::uint32_t scale) {
  if (scale == 0u) return key::float_of(0x00400000u);  // 2^-127 is subnormal
  return key::float_of(scale == 255u ? 0x7fc00000u : scale << 23);
}

/// An absmax that is nested.
SONICMOE_HD float nested_absmax(float value, float scale, float offset) {
  return key::add32(key::mul32(value, scale), offset);
}

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0); }

/// Bytes of the buffers of a packed tensor whose sizes have been checked.
struct Bytes {
  std::int64_t codes = 0;
  std::int64_t scales = 0;
  std::int64_t nested_scales = 0;  ///< 0 unless the absmax is nested
};

constexpr Bytes bytes_of(const PackedWeights& p) {
  const std::int64_t elements = p.experts * p.rows * p.columns;
  if (p.format == PackedFormat::kMXFP4) return {elements / 2, elements / kMXBlock, 0};
  if (p.format == PackedFormat::kFP8Blocks) {
    const std::int64_t tiles = divide_up(p.rows, kFP8Block) * divide_up(p.columns, kFP8Block);
    return {elements, p.experts * tiles * 4, 0};
  }
  const std::int64_t blocks = elements / p.block;
  if (p.nested_map.data == nullptr) return {elements / 2, blocks * 4, 0};
  return {elements / 2, blocks, divide_up(blocks, kNestedBlock) * 4};
}

}  // namespace sonicmoe::packed
