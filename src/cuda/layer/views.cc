#include "cuda/layer/views.h"

#include <algorithm>

#include "cuda/layer/moe.h"

namespace sonicmoe::cuda {

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
  return is_interleaved(weights.gate, weights.up) ? GateLayout::kInterleaved : GateLayout::kSplit;
}

Tensor h_rows(const Problem& problem, const Weights& weights, void* data) {
  const std::int64_t capacity = row_capacity(problem);
  switch (gate_layout(problem, weights)) {
    case GateLayout::kInterleaved:
      return tensor2(data, problem.dtype, capacity, 2 * problem.width);
    case GateLayout::kSplit:
      return tensor3(data, problem.dtype, capacity, 2, problem.width);
    case GateLayout::kNone:
      break;
  }
  return tensor3(data, problem.dtype, capacity, 1, problem.width);
}

WeightOperand up_operand(const Problem& problem, const Weights& weights) {
  switch (gate_layout(problem, weights)) {
    case GateLayout::kInterleaved:
      return {interleaved_rows(weights.gate), {}, WeightParts::kOne};
    case GateLayout::kSplit:
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

}  // namespace sonicmoe::cuda
