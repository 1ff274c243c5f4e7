// Where quantised weights and quantised rows lie in memory: the one description for every backend.
// A code is an e4m3 byte, a scale an fp32 power of two. Every array begins at a multiple of 256
// bytes of its buffer.
#pragma once

#include <cstdint>

#include "sonicmoe/moe.h"

namespace sonicmoe::fp8 {

/// Elements that share a scale: 1 x 128 of a row, 128 x 128 of a weight matrix.
inline constexpr std::int64_t kBlock = 128;

constexpr std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

/// The byte offsets of the arrays of Buffer fp8_weights.
///
/// | array    | shape                   | depth of the product that reads it                     |
/// |----------|-------------------------|--------------------------------------------------------|
/// | up       | (E, G, n, d) codes      | d: H. Gate first, then up                              |
/// | up_t     | (E, d, G*n) codes       | G*n: dX~. The n of gate, then those of up              |
/// | down     | (E, d, n) codes         | n: Y                                                   |
/// | down_t   | (E, n, d) codes         | d: dA'                                                 |
/// | up_s     | (E, G, n/128, d/128)    | the scales of up and up_t                              |
/// | down_s   | (E, d/128, n/128)       | the scales of down and down_t                          |
struct WeightsLayout {
  std::int64_t up = 0;
  std::int64_t up_t = 0;
  std::int64_t down = 0;
  std::int64_t down_t = 0;
  std::int64_t up_s = 0;
  std::int64_t down_s = 0;
  std::int64_t bytes = 0;
};

constexpr WeightsLayout weights_layout(const Problem& p) {
  const std::int64_t down = p.experts * p.hidden * p.width;
  const std::int64_t up = gate_factor(p.activation.kind) * down;
  const auto scales = [](std::int64_t codes) { return codes / (kBlock * kBlock) * 4; };
  WeightsLayout at;
  at.up_t = at.up + aligned(up);
  at.down = at.up_t + aligned(up);
  at.down_t = at.down + aligned(down);
  at.up_s = at.down_t + aligned(down);
  at.down_s = at.up_s + aligned(scales(up));
  at.bytes = at.down_s + aligned(scales(down));
  return at;
}

/// Quantised rows: (rows, depth) codes and (depth/128, scale_stride) scales. The scales of a block
/// of the depth are contiguous over the rows, so that one TMA box holds those of a tile's rows.
struct RowsLayout {
  std::int64_t codes = 0;
  std::int64_t scales = 0;
  std::int64_t scale_stride = 0;  ///< rows, rounded up to a multiple of 4: 16 bytes, as TMA needs
  std::int64_t bytes = 0;
};

constexpr RowsLayout rows_layout(std::int64_t rows, std::int64_t depth) {
  RowsLayout at;
  at.scales = aligned(rows * depth);
  at.scale_stride = (rows + 3) / 4 * 4;
  at.bytes = at.scales + aligned(depth / kBlock * at.scale_stride * 4);
  return at;
}

/// H as forward keeps it in fp8: rows of G*n, the n of gate, then those of up.
constexpr RowsLayout kept_h_layout(const Problem& p, std::int64_t capacity) {
  return rows_layout(capacity, gate_factor(p.activation.kind) * p.width);
}

/// Whether forward keeps codes and scales of H instead of H.
constexpr bool keeps_codes(const Problem& p) {
  return p.precision == Precision::kFp8 && p.kept_h == KeptH::kPrecision;
}

}  // namespace sonicmoe::fp8
