// Memory layout of quantised weights and quantised rows, the same in every backend. A code is one
// e4m3 byte; a scale is a power of two in fp32. Every array begins at a byte offset in its buffer
// that is a multiple of 256.
#pragma once

#include <cstdint>

#include "sonicmoe/moe.h"

namespace sonicmoe::fp8 {

/// Elements that share a scale: 1 x 128 of a row, 128 x 128 of a weight matrix. d and n are
/// multiples of 64 (kStep), so the last block of a dimension may have 64.
inline constexpr std::int64_t kBlock = 128;
inline constexpr std::int64_t kStep = 64;

constexpr std::int64_t blocks_of(std::int64_t size) { return (size + kBlock - 1) / kBlock; }
/// d or n, rounded up to whole blocks.
constexpr std::int64_t whole_blocks(std::int64_t size) { return blocks_of(size) * kBlock; }

constexpr std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

/// The byte offsets of the arrays in the buffer `fp8_weights`. Each weight matrix is stored in two
/// orientations, because the tensor cores read e4m3 operands with K, the summed dimension,
/// contiguous. All blocks are whole: here d and n are rounded up to multiples of 128, and a code
/// past the true d or n is 0. So no product of this padding changes a sum, and no k tile has codes
/// of both gate and up.
///
/// | array  | contents                                                   | read by | K   |
/// |--------|------------------------------------------------------------|---------|-----|
/// | up     | codes (E, G, n, d); gate before up                         | H       | d   |
/// | up_t   | codes (E, d, G*n); the n columns of gate, then those of up | dX~     | G*n |
/// | down   | codes (E, d, n)                                            | Y       | n   |
/// | down_t | codes (E, n, d)                                            | dA'     | d   |
/// | up_s   | scales (E, G, n/128, d/128) of up and up_t                 | H, dX~  |     |
/// | down_s | scales (E, d/128, n/128) of down and down_t                | Y, dA'  |     |
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
  const std::int64_t down = p.experts * whole_blocks(p.hidden) * whole_blocks(p.width);
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

/// The byte offsets of the arrays of quantised rows: codes (rows, parts, width), then scales
/// (parts * ceil(width/128), scale_stride). The blocks of a part begin at its first column. The
/// scales that consecutive rows have for the same block are contiguous, so one TMA box loads the
/// scales of all rows of a tile.
struct RowsLayout {
  std::int64_t codes = 0;
  std::int64_t scales = 0;
  std::int64_t scale_stride = 0;  ///< rows, rounded up to 4: TMA strides are multiples of 16 bytes
  std::int64_t bytes = 0;
};

constexpr RowsLayout rows_layout(std::int64_t rows, std::int64_t parts, std::int64_t width) {
  RowsLayout at;
  at.scales = aligned(rows * parts * width);
  at.scale_stride = (rows + 3) / 4 * 4;
  at.bytes = at.scales + aligned(parts * blocks_of(width) * at.scale_stride * 4);
  return at;
}

/// H as forward keeps it in fp8. A row has G*n codes, without padding: the n of gate, then the n of
/// up.
constexpr RowsLayout kept_h_layout(const Problem& p, std::int64_t capacity) {
  return rows_layout(capacity, gate_factor(p.activation.kind), p.width);
}

/// Whether forward keeps codes and scales of H instead of H.
constexpr bool keeps_codes(const Problem& p) {
  return p.precision == Precision::kFp8 && p.kept_h == KeptH::kPrecision;
}

}  // namespace sonicmoe::fp8
