#include "verify/oracle_fp8.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/fp8_layout.h"

namespace sonicmoe::oracle {
namespace {

constexpr double kLargest = 448.0;
constexpr double kLeastNormal = 0x1p-6;
constexpr int kBiases = (1023 - 7) << 3;  // of the exponents of double and e4m3

std::uint8_t* at(void* buffer, std::int64_t offset) {
  return static_cast<std::uint8_t*>(buffer) + offset;
}
const std::uint8_t* at(const void* buffer, std::int64_t offset) {
  return static_cast<const std::uint8_t*>(buffer) + offset;
}

double scale_at(const void* buffer, std::int64_t offset, std::int64_t index) {
  float scale = 0.0f;
  std::memcpy(&scale, at(buffer, offset + 4 * index), 4);
  return scale;
}
void put_scale(void* buffer, std::int64_t offset, std::int64_t index, double value) {
  const auto scale = static_cast<float>(value);
  std::memcpy(at(buffer, offset + 4 * index), &scale, 4);
}

// Byte offsets, in the weights' buffer, of one expert's codes, of their transposed copy and of
// their scales, and the codes from one row to the next in both copies.
struct Place {
  std::int64_t codes;
  std::int64_t stride;
  std::int64_t transposed;
  std::int64_t transposed_stride;
  std::int64_t scales;
};

void write_matrix(const Matrix<double>& m, const Place& place, void* buffer) {
  const Quantised q = quantise(m, kWeightBlocks);
  for (std::int64_t r = 0; r < m.rows; ++r) {
    for (std::int64_t c = 0; c < m.cols; ++c) {
      const std::uint8_t code = e4m3_code(q.values(r, c));
      *at(buffer, place.codes + r * place.stride + c) = code;
      *at(buffer, place.transposed + c * place.transposed_stride + r) = code;
    }
  }
  for (std::size_t i = 0; i < q.scales.values.size(); ++i) {
    put_scale(buffer, place.scales, static_cast<std::int64_t>(i), q.scales.values[i]);
  }
}

Matrix<double> read_matrix_at(const void* buffer, const Place& place, std::int64_t rows,
                              std::int64_t cols) {
  Quantised q{Matrix<double>(rows, cols),
              Matrix<double>(fp8::blocks_of(rows), fp8::blocks_of(cols))};
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      q.values(r, c) = e4m3_value(*at(buffer, place.codes + r * place.stride + c));
    }
  }
  for (std::size_t i = 0; i < q.scales.values.size(); ++i) {
    q.scales.values[i] = scale_at(buffer, place.scales, static_cast<std::int64_t>(i));
  }
  return restored(std::move(q), kWeightBlocks);
}

// Calls f(matrix, place of its codes) for gate, up and down of every expert of the layer.
template <class AnyLayer, class F>
void each_weight(AnyLayer& layer, F f) {
  const Problem& p = layer.problem;
  const fp8::WeightsLayout offset = fp8::weights_layout(p);
  const std::int64_t gates = gate_factor(p.activation.kind);
  const std::int64_t hidden = fp8::whole_blocks(p.hidden), width = fp8::whole_blocks(p.width);
  const std::int64_t size = hidden * width;
  const std::int64_t tiles = size / (128 * 128);
  for (std::int64_t e = 0; e < p.experts; ++e) {
    for (std::int64_t g = 0; g < gates; ++g) {
      const std::int64_t matrix = e * gates + g;
      f(g + 1 == gates ? layer.up[e] : layer.gate[e],
        Place{offset.up + matrix * size, hidden, offset.up_t + e * gates * size + g * width,
              gates * width, offset.up_s + 4 * matrix * tiles});
    }
    f(layer.down[e], Place{offset.down + e * size, width, offset.down_t + e * size, hidden,
                           offset.down_s + 4 * e * tiles});
  }
}

// Calls f(half of H, its first column and its first block in a row of the kept H) for gate, where
// there is one, and up.
template <class F>
void each_half(const Problem& p, F f) {
  const std::int64_t gates = gate_factor(p.activation.kind);
  for (std::int64_t g = 0; g < gates; ++g) {
    f(g + 1 == gates ? &HiddenRows::up : &HiddenRows::gate, g * p.width,
      g * fp8::blocks_of(p.width));
  }
}

// Calls f(begin, end, scale) for the values of each block in each row.
template <class F>
void each_run(Quantised& q, BlockShape block, F f) {
  for (std::int64_t i = 0; i < q.values.rows; ++i) {
    double* const row = q.values.row(i);
    double* scale = q.scales.row(i / block.rows);
    for (std::int64_t j = 0; j < q.values.cols; j += block.cols) {
      f(row + j, row + std::min(j + block.cols, q.values.cols), *scale++);
    }
  }
}

}  // namespace

double e4m3(double v) {
  if (!std::isfinite(v)) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = std::fabs(v);
  if (magnitude >= kLargest) return std::copysign(kLargest, v);
  // The power of two at or below the magnitude: a double without its mantissa.
  const auto exponent = std::bit_cast<std::uint64_t>(magnitude) & 0x7ff0000000000000;
  const double power = std::max(std::bit_cast<double>(exponent), kLeastNormal);
  // Here doubles are power / 8 apart, a step of e4m3: the sum is rounded to a step, ties to even.
  const double large = 0x1.8p49 * power;
  return std::copysign((magnitude + large) - large, v);
}

// e4m3 has the exponent's last four bits, less the difference of the biases, and the mantissa's
// first three bits of a double.
std::uint8_t e4m3_code(double value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::fabs(value);
  if (magnitude < kLeastNormal) {
    return static_cast<std::uint8_t>(sign | static_cast<int>(magnitude * 0x1p9));
  }
  const auto bits = static_cast<int>(std::bit_cast<std::uint64_t>(magnitude) >> 49);
  return static_cast<std::uint8_t>(sign | (bits - kBiases));
}

double e4m3_value(std::uint8_t code) {
  const int magnitude = code & 0x7f;
  const double sign = (code & 0x80) != 0 ? -1.0 : 1.0;
  if (magnitude == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  if (magnitude < 8) return sign * magnitude * 0x1p-9;
  return sign * std::bit_cast<double>(static_cast<std::uint64_t>(magnitude + kBiases) << 49);
}

double block_scale(double largest) {
  if (largest == 0.0) return 1.0;
  int exponent = 0;
  const double fraction = std::frexp(largest, &exponent);  // 448 = 0.875 * 2^9
  return std::ldexp(1.0, std::max(exponent - (fraction <= 0.875 ? 9 : 8), -126));
}

Quantised quantise(Matrix<double> m, BlockShape block) {
  Quantised q{std::move(m), {}};
  q.scales = Matrix<double>((q.values.rows + block.rows - 1) / block.rows,
                            (q.values.cols + block.cols - 1) / block.cols);
  each_run(q, block, [](double* begin, const double* end, double& largest) {
    for (const double* v = begin; v != end; ++v) {
      if (std::isfinite(*v)) largest = std::max(largest, std::fabs(*v));
    }
  });
  for (double& scale : q.scales.values) scale = block_scale(scale);
  each_run(q, block, [](double* begin, const double* end, double scale) {
    for (double* v = begin; v != end; ++v) *v = e4m3(*v / scale);
  });
  return q;
}

Matrix<double> restored(Quantised q, BlockShape block) {
  each_run(q, block, [](double* begin, const double* end, double scale) {
    for (double* v = begin; v != end; ++v) *v *= scale;
  });
  return std::move(q.values);
}

void write_fp8_weights(const Layer& layer, void* buffer) {
  const fp8::WeightsLayout offset = fp8::weights_layout(layer.problem);
  std::fill_n(at(buffer, offset.up), offset.up_s - offset.up, std::uint8_t{0});
  each_weight(layer,
              [&](const Matrix<double>& m, const Place& place) { write_matrix(m, place, buffer); });
}

void read_fp8_weights(const void* buffer, Layer& layer) {
  each_weight(layer, [&](Matrix<double>& m, const Place& place) {
    m = read_matrix_at(buffer, place, m.rows, m.cols);
  });
}

std::int64_t first_difference(const Problem& p, const void* a, const void* b) {
  const fp8::WeightsLayout offset = fp8::weights_layout(p);
  const std::int64_t down = p.experts * fp8::whole_blocks(p.hidden) * fp8::whole_blocks(p.width);
  const std::int64_t up = gate_factor(p.activation.kind) * down;
  const std::int64_t arrays[][2] = {{offset.up, up},
                                    {offset.up_t, up},
                                    {offset.down, down},
                                    {offset.down_t, down},
                                    {offset.up_s, up / (128 * 128) * 4},
                                    {offset.down_s, down / (128 * 128) * 4}};
  for (const auto& [begin, bytes] : arrays) {
    const auto* first = at(a, begin);
    const auto* other = std::mismatch(first, first + bytes, at(b, begin)).first;
    if (other != first + bytes) return begin + (other - first);
  }
  return -1;
}

void write_kept_h(const Problem& p, const HiddenRows& h, std::int64_t capacity, void* buffer) {
  const fp8::RowsLayout offset = fp8::kept_h_layout(p, capacity);
  const std::int64_t depth = gate_factor(p.activation.kind) * p.width;
  each_half(p,
            [&](Matrix<double> HiddenRows::* half, std::int64_t first, std::int64_t first_block) {
              const Matrix<double>& m = h.*half;
              const Quantised q = quantise(m, kRowBlocks);
              for (std::int64_t i = 0; i < m.rows; ++i) {
                for (std::int64_t j = 0; j < m.cols; ++j) {
                  *at(buffer, offset.codes + i * depth + first + j) = e4m3_code(q.values(i, j));
                }
                for (std::int64_t b = 0; b < q.scales.cols; ++b) {
                  put_scale(buffer, offset.scales, (first_block + b) * offset.scale_stride + i,
                            q.scales(i, b));
                }
              }
            });
}

HiddenRows read_kept_h(const Problem& p, std::int64_t rows, std::int64_t capacity,
                       const void* buffer) {
  const fp8::RowsLayout offset = fp8::kept_h_layout(p, capacity);
  const std::int64_t depth = gate_factor(p.activation.kind) * p.width;
  HiddenRows h;
  each_half(
      p, [&](Matrix<double> HiddenRows::* half, std::int64_t first, std::int64_t first_block) {
        Quantised q{Matrix<double>(rows, p.width), Matrix<double>(rows, fp8::blocks_of(p.width))};
        for (std::int64_t i = 0; i < rows; ++i) {
          for (std::int64_t j = 0; j < p.width; ++j) {
            q.values(i, j) = e4m3_value(*at(buffer, offset.codes + i * depth + first + j));
          }
          for (std::int64_t b = 0; b < q.scales.cols; ++b) {
            q.scales(i, b) =
                scale_at(buffer, offset.scales, (first_block + b) * offset.scale_stride + i);
          }
        }
        h.*half = restored(std::move(q), kRowBlocks);
      });
  return h;
}

}  // namespace sonicmoe::oracle
