#include "cuda/blackwell/probe_codes.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/fp8_quantize.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::blackwell::probed {
namespace {

using Codes = std::vector<std::uint8_t>;

std::int64_t stride_of(std::int64_t rows) { return fp8::rows_layout(rows, 1, 0).scale_stride; }

/// Of integers from -2 to 2.
Codes codes_of(const std::vector<int>& values) {
  Codes codes;
  for (const int v : values) codes.push_back(fp8::e4m3_of(static_cast<float>(v)));
  return codes;
}

/// Powers of two from 1/2^most to 2^most; `most` is 1 or 2.
std::vector<float> scales_of(std::size_t count, unsigned seed, int most) {
  std::vector<float> scales;
  for (const int exponent : small_integers(count, seed)) {
    scales.push_back(std::ldexp(1.0f, std::clamp(exponent, -most, most)));
  }
  return scales;
}

float value_of(Bits bits) { return __bfloat162float(__ushort_as_bfloat16(bits)); }
Bits rounded(float value) { return bits_of(value, DType::kBF16); }

/// The operands of a product of codes in device memory, and D.
struct CodedProduct {
  RowOperand rows;
  WeightOperand weights;
  std::vector<float> sums;
};

/// A scale for each token and block of K, and for each expert, block of columns and block of K. The
/// columns are those of `parts` matrices: 2 are gate and up. D is exact in fp32.
CodedProduct coded_product(const Trial& t, Operands& o, int parts, int most_exponent) {
  const int columns = t.columns / parts;
  const auto blocks = std::size_t(t.width / kScaleBlock);
  const auto column_blocks = std::size_t(fp8::blocks_of(columns));
  const std::size_t part_scales = column_blocks * blocks;
  const std::vector<float> of_rows = scales_of(t.tokens() * blocks, 6, most_exponent);
  const std::vector<float> of_weights =
      scales_of(t.rows.size() * parts * part_scales, 7, most_exponent);
  std::vector<float> sums = scaled_products_of(
      t, o, [&](std::size_t e, std::size_t token, std::size_t column, std::size_t block) {
        const std::size_t part = e * parts + column / columns;
        const std::size_t column_block = column % columns / kScaleBlock;
        return of_rows[token * blocks + block] *
               of_weights[part * part_scales + column_block * blocks + block];
      });
  std::uint8_t* const codes = o.work.copy(codes_of(o.other));
  Tensor first = tensor3(codes, t.dtype, t.experts(), columns, t.width), second{};
  first.stride[0] *= parts;
  if (parts == 2) {
    second = first;
    second.data = codes + std::size_t(columns) * t.width;
  }
  return {.rows = {.rows = tensor2(o.work.copy(codes_of(o.x)), t.dtype, t.tokens(), t.width),
                   .index = o.index,
                   .scales = {.data = o.work.copy(of_rows)}},
          .weights = {.first = first,
                      .second = second,
                      .parts = parts == 2 ? WeightParts::kSideBySide : WeightParts::kOne,
                      .scales = {.data = o.work.copy(of_weights),
                                 .expert_stride = static_cast<std::int64_t>(parts * part_scales),
                                 .part_stride = static_cast<std::int64_t>(part_scales),
                                 .column_stride = static_cast<std::int64_t>(blocks),
                                 .depth_stride = 1}},
          .sums = std::move(sums)};
}

std::string fault_of_codes(const Device& device, const Trial& t) {
  Operands o(t, t.rows.size() * t.columns * t.width);
  const CodedProduct product = coded_product(t, o, 1, 2);
  Bits* const out = o.out(bits_of(product.sums, t.dtype), t.columns);
  return fault_of(device, t, o, product.rows, product.weights,
                  StoreOutput{tensor2(out, t.dtype, t.all_rows(), t.columns)});
}

/// Rows (rows, parts, columns) of bf16 elements.
struct Elements {
  int parts, columns;
  std::vector<Bits> bits;
  Bits at(std::size_t row, int part, int column) const {
    return bits[(row * parts + part) * columns + column];
  }
};

/// Memory for the codes of `values` as a kernel must store them, with `width` codes in each part.
/// Those past the columns of a part are zeros.
CodedRows out_codes(const Trial& t, Operands& o, const Elements& values, std::int64_t width) {
  const std::int64_t rows = t.all_rows(), stride = stride_of(rows);
  const std::int64_t blocks = fp8::blocks_of(values.columns);
  Codes codes(rows * values.parts * width);
  // A kernel leaves what is between the scales of two blocks as it is.
  std::vector<float> scales(values.parts * blocks * stride,
                            std::bit_cast<float>(std::uint32_t{kUntouched} * 0x10001u));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int part = 0; part < values.parts; ++part) {
      for (std::int64_t block = 0; block < blocks; ++block) {
        const auto first = static_cast<int>(block * fp8::kBlock);
        const int end = std::min(first + static_cast<int>(fp8::kBlock), values.columns);
        std::uint32_t largest = 0;
        for (int c = first; c < end; ++c) {
          largest = std::max(largest, fp8::magnitude_of(value_of(values.at(row, part, c))));
        }
        const float scale = fp8::scale_of(largest), inverse = fp8::inverse_of(scale);
        scales[(part * blocks + block) * stride + row] = scale;
        for (int c = first; c < end; ++c) {
          codes[(row * values.parts + part) * width + c] =
              fp8::code_of(value_of(values.at(row, part, c)), inverse);
        }
      }
    }
  }
  const auto row_codes = static_cast<int>(values.parts * width);
  return {tensor3(o.out_of(codes, row_codes), t.dtype, rows, values.parts, width),
          {o.out_of(scales, static_cast<int>(stride)), stride}};
}

/// H = D + bias, and A = relu(gate) up, or relu(H) without a gate. H is kept as codes with a gate,
/// in bf16 without one.
std::string fault_of_activate(const Device& device, const Trial& t, GateLayout layout) {
  const int parts = layout == GateLayout::kNone ? 1 : 2, width = t.columns / parts;
  const std::int64_t rows = t.all_rows();
  Operands o(t, t.rows.size() * t.columns * t.width);
  const std::vector<int> biases = small_integers(t.rows.size() * t.columns, 3);
  const CodedProduct product = coded_product(t, o, parts, 2);
  Elements h{parts, width, {}}, a{1, width, {}};
  std::size_t row = 0;
  for (std::size_t e = 0; e < t.rows.size(); ++e) {
    for (int r = 0; r < t.rows[e]; ++r, ++row) {
      for (int c = 0; c < t.columns; ++c) {
        const auto bias = static_cast<float>(biases[e * t.columns + c]);
        h.bits.push_back(rounded(product.sums[row * t.columns + c] + bias));
      }
      for (int c = 0; c < width; ++c) {
        const float up = parts == 2 ? value_of(h.at(row, 1, c)) : 1.0f;
        a.bits.push_back(rounded(relu(value_of(h.at(row, 0, c))) * up));
      }
    }
  }
  Bits* const bias = o.work.copy(bits_of(biases, t.dtype));
  StoredRows kept;
  if (parts == 2) {
    kept.codes = out_codes(t, o, h, width);
  } else {
    kept.elements = tensor3(o.out(h.bits, width), t.dtype, rows, 1, width);
  }
  CodedRows codes_of_a = out_codes(t, o, a, width);
  codes_of_a.codes = tensor2(codes_of_a.codes.data, t.dtype, rows, width);
  const Activate epilogue{
      .h = kept,
      .a = {.codes = codes_of_a},
      .bias_gate = bias_of(t, bias, 0, width),
      .bias_up = bias_of(t, bias, parts - 1, width),
      .activation = {parts == 2 ? ActivationKind::kReGLU : ActivationKind::kReLU},
      .layout = layout};
  return fault_of(device, t, o, product.rows, product.weights, epilogue);
}

/// H for an epilogue of dH: small integers, times a scale of each block if they are codes.
struct Hidden {
  StoredRows stored;
  std::vector<float> values;  ///< (rows, 2, columns)
};

Hidden hidden_of(const Trial& t, Operands& o, bool is_coded) {
  const std::int64_t rows = t.all_rows(), columns = t.columns;
  const std::int64_t stride = stride_of(rows), blocks = fp8::blocks_of(columns);
  const std::vector<int> integers = small_integers(rows * 2 * columns, 4);
  Hidden hidden{{}, {integers.begin(), integers.end()}};
  if (!is_coded) {
    hidden.stored.elements =
        tensor3(o.work.copy(bits_of(integers, t.dtype)), t.dtype, rows, 2, columns);
    return hidden;
  }
  const std::vector<float> scales = scales_of(2 * blocks * stride, 8, 1);
  for (std::int64_t i = 0; i < std::ssize(integers); ++i) {
    const std::int64_t part = i / columns % 2, block = i % columns / fp8::kBlock;
    hidden.values[i] *= scales[(part * blocks + block) * stride + i / (2 * columns)];
  }
  hidden.stored.codes = {tensor3(o.work.copy(codes_of(integers)), t.dtype, rows, 2, columns),
                         {o.work.copy(scales), stride}};
  return hidden;
}

/// dH as elements and as codes, A' and the parts of dS of relu(gate) up, with row weights of small
/// integers. If gate and up are apart, H is codes; if they alternate in dH, H is bf16.
std::string fault_of_activate_grad(const Device& device, const Trial& t, GateLayout layout) {
  const int width = t.columns, rows = t.all_rows();
  const int score_parts = (width + portable::kWarpColumns - 1) / portable::kWarpColumns;
  Operands o(t, t.rows.size() * t.columns * t.width);
  const CodedProduct product = coded_product(t, o, 1, 1);
  const Hidden hidden = hidden_of(t, o, layout == GateLayout::kConcatenated);
  const std::vector<int> weights = small_integers(rows, 5);
  Elements dh{2, width, std::vector<Bits>(hidden.values.size())};
  std::vector<Bits> stored_dh(hidden.values.size()), a;
  std::vector<float> scores(std::size_t(rows) * score_parts);
  for (std::size_t row = 0; row < std::size_t(rows); ++row) {
    const auto weight = static_cast<float>(weights[row]);
    const std::size_t line = row * 2 * width;
    for (int c = 0; c < width; ++c) {
      const HiddenColumns at(layout, c, width);
      const float gate = hidden.values[line + c], up = hidden.values[line + width + c];
      const float grad = product.sums[row * width + c], value = relu(gate) * up;
      const Bits of_gate = rounded(relu_slope(gate, weight * grad) * up);
      const Bits of_up = rounded(relu(gate) * (weight * grad));
      dh.bits[line + c] = stored_dh[line + at.gate] = of_gate;
      dh.bits[line + width + c] = stored_dh[line + at.up] = of_up;
      a.push_back(rounded(weight * value));
      scores[row * score_parts + c / portable::kWarpColumns] += grad * value;
    }
  }
  const ActivateGrad epilogue{
      .h = hidden.stored,
      .dh = {.elements = tensor2(o.out(std::move(stored_dh), 2 * width), t.dtype, rows, 2 * width),
             .codes = out_codes(t, o, dh, fp8::whole_blocks(width))},
      .a = tensor2(o.out(std::move(a), width), t.dtype, rows, width),
      .row_weight = o.work.copy(std::vector<float>(weights.begin(), weights.end())),
      .score_parts = o.out_of(scores, 2 * score_parts),
      .score_tiles = score_parts,
      .activation = {ActivationKind::kReGLU},
      .layout = layout};
  return fault_of(device, t, o, product.rows, product.weights, epilogue);
}

template <GateLayout kLayout>
std::string fault_of_a(const Device& device, const Trial& t) {
  return fault_of_activate(device, t, kLayout);
}
template <GateLayout kLayout>
std::string fault_of_dh(const Device& device, const Trial& t) {
  return fault_of_activate_grad(device, t, kLayout);
}

const std::vector<int> kRows{160, 0, 1, 71};

}  // namespace

std::span<const CodesTrial> codes_trials() {
  // K is whole blocks. Half of the last block of columns does not exist.
  static const CodesTrial kTrials[] = {
      {{"codes of 300, 0, 1 and 129 rows", {300, 0, 1, 129}, 384, 264, DType::kBF16, true},
       &fault_of_codes},
      {{"A from codes, with a gate", kRows, 256, 2 * 192, DType::kBF16, true},
       &fault_of_a<GateLayout::kConcatenated>},
      {{"A from codes, without a gate", kRows, 256, 192, DType::kBF16, true},
       &fault_of_a<GateLayout::kNone>},
      {{"dH from codes, of H in codes", kRows, 640, 192, DType::kBF16, true},
       &fault_of_dh<GateLayout::kConcatenated>},
      {{"dH from codes, of H in bf16", kRows, 640, 192, DType::kBF16, true},
       &fault_of_dh<GateLayout::kInterleaved>},
  };
  return kTrials;
}

}  // namespace sonicmoe::cuda::blackwell::probed
