#include "cuda/layer/views.h"

#include <algorithm>

namespace sonicmoe::cuda {
namespace {

Tensor hidden_rows(const Problem& problem, GateLayout layout, void* data) {
  const std::int64_t capacity = row_capacity(problem);
  if (layout == GateLayout::kInterleaved) {
    return tensor2(data, problem.dtype, capacity, 2 * problem.width);
  }
  return tensor3(data, problem.dtype, capacity, layout == GateLayout::kConcatenated ? 2 : 1,
                 problem.width);
}

RowScales row_scales(void* base, const fp8::RowsLayout& at) {
  return {reinterpret_cast<float*>(static_cast<std::uint8_t*>(base) + at.scales), at.scale_stride};
}

/// The arrays of codes in the buffer `fp8_weights` (fp8::WeightsLayout).
enum class CodedArray { kUp, kUpTransposed, kDown, kDownTransposed };

WeightOperand coded_operand(const Problem& p, const Buffer& buffer, CodedArray array) {
  const fp8::WeightsLayout at = fp8::weights_layout(p);
  const bool is_up = array == CodedArray::kUp || array == CodedArray::kUpTransposed;
  const bool is_transposed =
      array == CodedArray::kUpTransposed || array == CodedArray::kDownTransposed;
  const std::int64_t gates = gate_factor(p.activation.kind);
  const std::int64_t parts = array == CodedArray::kUp ? gates : 1;
  const std::int64_t hidden = fp8::whole_blocks(p.hidden), width = fp8::whole_blocks(p.width);
  // up and down_t have n columns, the others d.
  const bool has_width = is_up != is_transposed;
  const std::int64_t columns = has_width ? width : hidden;
  const std::int64_t depth = has_width ? hidden : (is_up ? gates * width : width);
  auto* bytes = static_cast<std::uint8_t*>(buffer.data);
  const std::int64_t codes[] = {at.up, at.up_t, at.down, at.down_t};
  Tensor first =
      tensor3(bytes + codes[static_cast<int>(array)], DType::kBF16, p.experts, columns, depth);
  first.stride[0] *= parts;
  // One array of scales serves both orientations: (columns, depth) of the one that is not
  // transposed.
  WeightScales scales;
  scales.data = reinterpret_cast<const float*>(bytes + (is_up ? at.up_s : at.down_s));
  scales.column_stride = is_transposed ? 1 : depth / kScaleBlock;
  scales.depth_stride = is_transposed ? columns / kScaleBlock : 1;
  scales.part_stride = columns / kScaleBlock * scales.column_stride;
  scales.expert_stride = parts * columns * depth / (kScaleBlock * kScaleBlock);
  if (parts == 1) return {first, {}, WeightParts::kOne, scales};
  Tensor second = first;
  second.data = static_cast<std::uint8_t*>(first.data) + columns * depth;
  return {first, second, WeightParts::kSideBySide, scales};
}

}  // namespace

bool is_interleaved(const Tensor& gate, const Tensor& up) {
  const auto* next = static_cast<const std::byte*>(gate.data) + dtype_bytes(gate.dtype);
  return gate.data != nullptr && up.data == next && gate.dtype == up.dtype && gate.stride[1] == 2 &&
         std::equal(gate.stride, gate.stride + 3, up.stride);
}

Tensor interleaved_rows(const Tensor& gate) {
  Tensor t = gate;
  t.shape[1] *= 2;
  t.stride[1] = 1;
  return t;
}

Tensor transposed(const Tensor& matrices) {
  Tensor t = matrices;
  std::swap(t.shape[1], t.shape[2]);
  std::swap(t.stride[1], t.stride[2]);
  return t;
}

GateLayout gate_layout(const Problem& problem, const Weights& weights) {
  if (!is_gated(problem.activation.kind)) return GateLayout::kNone;
  return is_interleaved(weights.gate, weights.up) ? GateLayout::kInterleaved
                                                  : GateLayout::kConcatenated;
}

GateLayout h_layout(const Problem& problem, const Weights& weights) {
  const GateLayout layout = gate_layout(problem, weights);
  const bool alternates = layout == GateLayout::kInterleaved;
  return problem.precision == Precision::kFp8 && alternates ? GateLayout::kConcatenated : layout;
}

Tensor h_rows(const Problem& problem, const Weights& weights, void* data) {
  return hidden_rows(problem, h_layout(problem, weights), data);
}
Tensor dh_rows(const Problem& problem, const Weights& weights, void* data) {
  return hidden_rows(problem, gate_layout(problem, weights), data);
}

std::int64_t h_bytes(const Problem& problem) {
  const std::int64_t capacity = row_capacity(problem);
  if (fp8::keeps_codes(problem)) return fp8::kept_h_layout(problem, capacity).bytes;
  return gate_factor(problem.activation.kind) * capacity * problem.width *
         dtype_bytes(problem.dtype);
}

StoredRows kept_h(const Problem& problem, const Weights& weights, void* buffer) {
  if (buffer == nullptr) return {};
  if (!fp8::keeps_codes(problem)) return {.elements = h_rows(problem, weights, buffer)};
  const std::int64_t capacity = row_capacity(problem);
  const fp8::RowsLayout at = fp8::kept_h_layout(problem, capacity);
  return {.codes = {tensor3(static_cast<std::uint8_t*>(buffer) + at.codes, DType::kBF16, capacity,
                            gate_factor(problem.activation.kind), problem.width),
                    row_scales(buffer, at)}};
}

CodedRows take_token_codes(Carver<256>& carver, std::int64_t rows, std::int64_t width) {
  const std::int64_t depth = fp8::whole_blocks(width);
  void* codes = carver.take<std::uint8_t>(rows * depth);
  return {tensor2(codes, DType::kBF16, rows, depth),
          {carver.take<float>(rows * (depth / kScaleBlock)), 0}};
}

CodedRows take_row_codes(Carver<256>& carver, std::int64_t rows, std::int64_t depth) {
  const fp8::RowsLayout at = fp8::rows_layout(rows, 1, depth);
  auto* base = carver.take<std::uint8_t>(at.bytes);
  return {tensor2(base + at.codes, DType::kBF16, rows, depth), row_scales(base, at)};
}

WeightOperand up_operand(const Problem& problem, const Weights& weights) {
  switch (gate_layout(problem, weights)) {
    case GateLayout::kInterleaved:
      return {interleaved_rows(weights.gate), {}, WeightParts::kOne};
    case GateLayout::kConcatenated:
      return {weights.gate, weights.up, WeightParts::kSideBySide};
    case GateLayout::kNone:
      break;
  }
  return {weights.up, {}, WeightParts::kOne};
}

WeightOperand up_operand_transposed(const Problem& problem, const Weights& weights) {
  WeightOperand operand = up_operand(problem, weights);
  operand.first = transposed(operand.first);
  operand.second = transposed(operand.second);
  if (operand.parts == WeightParts::kSideBySide) operand.parts = WeightParts::kOneAfterOther;
  return operand;
}

WeightOperand WeightOperands::up() const {
  if (coded()) return coded_operand(problem_, codes_, CodedArray::kUp);
  return up_operand(problem_, weights_);
}

WeightOperand WeightOperands::up_transposed() const {
  if (coded()) return coded_operand(problem_, codes_, CodedArray::kUpTransposed);
  return up_operand_transposed(problem_, weights_);
}

WeightOperand WeightOperands::down() const {
  if (coded()) return coded_operand(problem_, codes_, CodedArray::kDown);
  return {weights_.down, {}, WeightParts::kOne};
}

WeightOperand WeightOperands::down_transposed() const {
  if (coded()) return coded_operand(problem_, codes_, CodedArray::kDownTransposed);
  return {transposed(weights_.down), {}, WeightParts::kOne};
}

}  // namespace sonicmoe::cuda
