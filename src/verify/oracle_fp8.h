// Quantisation as docs/fp8.md defines it, in fp64: e4m3 codes and power-of-two scales of blocks of
// 128 values of a row, or of 128 x 128 values of a weight matrix.
#pragma once

#include "verify/oracle.h"

namespace sonicmoe::oracle {

/// The nearest e4m3 value, ties to the even mantissa; past 448 the value 448. NaN for NaN and
/// infinities.
double e4m3(double v);
/// The code of an e4m3 value.
std::uint8_t e4m3_code(double value);
/// The value of a code.
double e4m3_value(std::uint8_t code);
/// The scale of a block whose largest finite magnitude is `largest`.
double block_scale(double largest);

/// Elements of a block along the rows and along the columns.
struct BlockShape {
  std::int64_t rows = 1;
  std::int64_t cols = 128;
};
inline constexpr BlockShape kRowBlocks = {1, 128};
inline constexpr BlockShape kWeightBlocks = {128, 128};

/// A matrix whose elements are e4m3 values times the scales of their blocks.
struct Quantised {
  Matrix<double> values;  ///< e4m3 values, without their scales
  Matrix<double> scales;  ///< one a block
};
Quantised quantise(const Matrix<double>& m, BlockShape block);
/// Values times scales.
Matrix<double> restored(const Quantised& q, BlockShape block);

/// The buffer of quantize_weights() for the unquantised weights of a layer. Bytes between the
/// arrays are left as they are.
void write_fp8_weights(const Layer& layer, void* buffer);
/// Replaces gate, up and down of a layer by what the buffer holds.
void read_fp8_weights(const void* buffer, Layer& layer);
/// The first byte at which the arrays of two buffers differ, or -1.
std::int64_t first_difference(const Problem& problem, const void* a, const void* b);

/// H in the form in which it is kept in fp8, `capacity` rows; rows past those of `h` are left as
/// they are. H itself must be bf16 values.
void write_kept_h(const Problem& problem, const HiddenRows& h, std::int64_t capacity, void* buffer);
HiddenRows read_kept_h(const Problem& problem, std::int64_t rows, std::int64_t capacity,
                       const void* buffer);

}  // namespace sonicmoe::oracle
