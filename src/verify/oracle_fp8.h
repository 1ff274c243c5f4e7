// Quantisation as docs/fp8.md defines it, in fp64: e4m3 codes, and one power-of-two scale for each
// block of 1 x 128 values of a row or of 128 x 128 values of a weight matrix. The last block of a
// dimension may have fewer rows or columns.
#pragma once

#include "verify/oracle.h"

namespace sonicmoe::oracle {

/// The e4m3 value nearest to v, ties to the even mantissa; +-448 for larger finite magnitudes; NaN
/// for NaN and infinities.
double e4m3(double v);
/// The code of a value that e4m3 can represent.
std::uint8_t e4m3_code(double value);
/// The e4m3 value of a code.
double e4m3_value(std::uint8_t code);
/// The scale of a block whose largest finite magnitude is `largest`.
double block_scale(double largest);

/// Numbers of rows and of columns of a block that is not the last one.
struct BlockShape {
  std::int64_t rows = 1;
  std::int64_t cols = 128;
};
inline constexpr BlockShape kRowBlocks = {1, 128};
inline constexpr BlockShape kWeightBlocks = {128, 128};

/// A quantised matrix: each element is an e4m3 value times the scale of its block.
struct Quantised {
  Matrix<double> values;  ///< e4m3 values, before they are multiplied by scales
  Matrix<double> scales;  ///< one for each block
};
Quantised quantise(Matrix<double> m, BlockShape block);
/// The dequantised matrix: values times scales.
Matrix<double> restored(Quantised q, BlockShape block);

/// Quantises gate, up and down of `layer` into `buffer`, which has the layout that
/// quantize_weights() writes: past d and n, codes are 0. Does not write the bytes between the
/// arrays.
void write_fp8_weights(const Layer& layer, void* buffer);
/// Replaces gate, up and down of `layer` by the dequantised weights of `buffer`.
void read_fp8_weights(const void* buffer, Layer& layer);
/// The offset of the first byte at which two buffers of quantised weights differ, or -1. The codes
/// past d and n are compared too, the bytes between the arrays are not.
std::int64_t first_difference(const Problem& problem, const void* a, const void* b);

/// Quantises `h`, whose values must be bf16 values, into `buffer`, which has the layout of the kept
/// H with `capacity` rows. Does not write the rows past those of `h`.
void write_kept_h(const Problem& problem, const HiddenRows& h, std::int64_t capacity, void* buffer);
/// The first `rows` rows of the kept H, dequantised.
HiddenRows read_kept_h(const Problem& problem, std::int64_t rows, std::int64_t capacity,
                       const void* buffer);

}  // namespace sonicmoe::oracle
