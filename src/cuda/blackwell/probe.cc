#include "cuda/blackwell/probe.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/blackwell/probe_codes.h"
#include "cuda/blackwell/probe_trial.h"
#include "cuda/blackwell/products.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::blackwell {
namespace probed {
namespace {

// A tile of 256 rows; rows past the end of an expert, with MN-major weights; rings that go round,
// with tiles of 128 rows and 64 columns; the epilogues of A and dH; weight gradients. Each has a k
// tile that is not full. Together they run all kernels of elements.
const Trial kInOrder{"256 rows in order", {256}, 520, 256, DType::kBF16, false};
const Trial kGathered{"200 gathered rows", {200}, 136, 200, DType::kBF16, true};
const Trial kExperts{
    "experts of 300, 0, 1 and 129 rows", {300, 0, 1, 129}, 456, 264, DType::kF16, true};
const Trial kActivated{"A, gate and up apart", {160, 0, 1, 71}, 136, 2 * 136, DType::kBF16, true};
const Trial kActivatedPairs{
    "A, gate and up alternating", {160, 0, 1, 71}, 136, 2 * 136, DType::kF16, true};
const Trial kActivatedGrad{"dH, gate and up apart", {160, 0, 1, 71}, 136, 136, DType::kBF16, true};
const Trial kActivatedGradPairs{
    "dH, gate and up alternating", {160, 0, 1, 71}, 136, 136, DType::kF16, true};

/// The trial of a weight gradient.
Trial grad_trial(DType dtype) {
  return {"a weight gradient of 100, 0, 70, 1 and 192 rows",
          {100, 0, 70, 1, 192},
          136,
          200,
          dtype,
          true};
}

enum class Order { kDepth, kColumns };  ///< what is contiguous in the weights

std::vector<float> products_of(const Trial& t, const Operands& o) {
  return scaled_products_of(t, o, [](auto...) { return 1.0f; });
}

/// The weights (experts, columns, width) in device memory.
Tensor weights_of(const Trial& t, Operands& o, Order order) {
  const auto columns = std::size_t(t.columns), depth = std::size_t(t.width);
  std::vector<int> stored = o.other;
  for (std::size_t i = 0; order == Order::kColumns && i < stored.size(); ++i) {
    const std::size_t e = i / (columns * depth), c = i / depth % columns, k = i % depth;
    stored[(e * depth + k) * columns + c] = o.other[i];
  }
  Tensor weights =
      tensor3(o.work.copy(bits_of(stored, t.dtype)), t.dtype, t.experts(), t.columns, t.width);
  if (order == Order::kColumns) weights.stride[1] = 1, weights.stride[2] = t.columns;
  return weights;
}

std::string fault_of_rows(const Device& device, const Trial& t, Order order) {
  Operands o(t, t.rows.size() * t.columns * t.width);
  Bits* const out = o.out(bits_of(products_of(t, o), t.dtype), t.columns);
  return fault_of(device, t, o, o.rows(t), {weights_of(t, o, order), {}, WeightParts::kOne},
                  StoreOutput{tensor2(out, t.dtype, t.all_rows(), t.columns)});
}

/// H = D + bias and A = relu(gate) up.
std::string fault_of_activate(const Device& device, const Trial& t, GateLayout layout) {
  const int width = t.columns / 2;
  Operands o(t, t.rows.size() * t.columns * t.width);
  const std::vector<int> biases = small_integers(t.rows.size() * t.columns, 3);
  const std::vector<float> sums = products_of(t, o);
  std::vector<Bits> h(sums.size()), a;
  std::size_t row = 0;
  for (std::size_t e = 0; e < t.rows.size(); ++e) {
    for (int r = 0; r < t.rows[e]; ++r, ++row) {
      for (int c = 0; c < width; ++c) {
        const HiddenColumns at(layout, c, width);
        const auto hidden = [&](int column, int part) {
          const std::size_t i = row * t.columns + column;
          const float sum = sums[i] + static_cast<float>(biases[(e * 2 + part) * width + c]);
          h[i] = bits_of(sum, t.dtype);
          return sum;
        };
        const float gate = hidden(at.gate, 0), up = hidden(at.up, 1);
        a.push_back(bits_of(relu(gate) * up, t.dtype));
      }
    }
  }
  const auto rows = std::int64_t{t.all_rows()};
  Bits* const bias = o.work.copy(bits_of(biases, t.dtype));
  const bool apart = layout == GateLayout::kConcatenated;
  Tensor gate = weights_of(t, o, apart ? Order::kDepth : Order::kColumns), up{};
  if (apart) {
    gate.shape[1] = width;
    up = gate;
    up.data = static_cast<Bits*>(gate.data) + width * gate.stride[1];
  }
  const Activate epilogue{.h = {tensor2(o.out(std::move(h), t.columns), t.dtype, rows, t.columns)},
                          .a = {tensor2(o.out(std::move(a), width), t.dtype, rows, width)},
                          .bias_gate = bias_of(t, bias, 0, width),
                          .bias_up = bias_of(t, bias, 1, width),
                          .activation = {ActivationKind::kReGLU},
                          .layout = layout};
  return fault_of(device, t, o, o.rows(t),
                  {gate, up, apart ? WeightParts::kSideBySide : WeightParts::kOne}, epilogue);
}

/// dH, A' and the parts of dS of relu(gate) up, with H and row weights of small integers.
std::string fault_of_activate_grad(const Device& device, const Trial& t, GateLayout layout) {
  const int width = t.columns, rows = t.all_rows();
  const int parts = (width + portable::kWarpColumns - 1) / portable::kWarpColumns;
  Operands o(t, t.rows.size() * t.columns * t.width);
  const std::vector<int> hidden = small_integers(std::size_t(rows) * 2 * width, 4);
  const std::vector<int> weights = small_integers(rows, 5);
  const std::vector<float> sums = products_of(t, o);
  std::vector<Bits> dh(hidden.size()), a;
  std::vector<float> scores(std::size_t(rows) * parts);
  for (std::size_t row = 0; row < std::size_t(rows); ++row) {
    const auto weight = static_cast<float>(weights[row]);
    for (int c = 0; c < width; ++c) {
      const HiddenColumns at(layout, c, width);
      const std::size_t line = row * 2 * width;
      const auto gate = static_cast<float>(hidden[line + at.gate]);
      const auto up = static_cast<float>(hidden[line + at.up]);
      const float grad = sums[row * width + c];
      const float value = relu(gate) * up;
      dh[line + at.gate] = bits_of(relu_slope(gate, weight * grad) * up, t.dtype);
      dh[line + at.up] = bits_of(relu(gate) * (weight * grad), t.dtype);
      a.push_back(bits_of(weight * value, t.dtype));
      scores[row * parts + c / portable::kWarpColumns] += grad * value;
    }
  }
  const Tensor h = tensor2(o.work.copy(bits_of(hidden, t.dtype)), t.dtype, rows, 2 * width);
  const ActivateGrad epilogue{
      .h = {h},
      .dh = {tensor2(o.out(std::move(dh), 2 * width), t.dtype, rows, 2 * width)},
      .a = tensor2(o.out(std::move(a), width), t.dtype, rows, width),
      .row_weight = o.work.copy(std::vector<float>(weights.begin(), weights.end())),
      .score_parts = o.out_of(scores, 2 * parts),
      .score_tiles = parts,
      .activation = {ActivationKind::kReGLU},
      .layout = layout};
  const Order order = layout == GateLayout::kConcatenated ? Order::kColumns : Order::kDepth;
  return fault_of(device, t, o, o.rows(t), {weights_of(t, o, order), {}, WeightParts::kOne},
                  epilogue);
}

/// D (experts, width, columns): of each expert, gathered rows^T * rows.
std::string fault_of_grad(const Device& device, const Trial& t) {
  const auto columns = std::size_t(t.columns), width = std::size_t(t.width);
  Operands o(t, std::size_t(t.all_rows()) * columns);
  std::vector<Bits> expected;
  std::size_t begin = 0;
  for (const int rows : t.rows) {
    std::vector<int> sums(width * columns);
    for (std::size_t p = begin; p < begin + rows; ++p) {
      const int* x = o.x.data() + std::size_t(o.row_of[p]) * width;
      const int* right = o.other.data() + p * columns;
      for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += x[i / columns] * right[i % columns];
    }
    for (const int sum : sums) expected.push_back(bits_of(static_cast<float>(sum), t.dtype));
    begin += rows;
  }
  Bits* const out = o.out(std::move(expected), t.columns);
  const Tensor right =
      tensor2(o.work.copy(bits_of(o.other, t.dtype)), t.dtype, t.all_rows(), t.columns);
  const DepthProduct product{.dtype = t.dtype,
                             .groups = o.groups(t),
                             .left = o.rows(t),
                             .right = right,
                             .right_part = 0,
                             .out = {tensor3(out, t.dtype, t.experts(), t.width, t.columns), {}},
                             .parts = GradParts::kOne,
                             .mode = GradMode::kWrite,
                             .hints = {},
                             .companion = Companion::kNone};
  multiply_depth_within(o.limit(), one_pair_of(device), product, o.work.stream());
  return o.fault(device, t);
}

std::string run_probe(const Device& device, std::string_view only) {
  const CurrentDevice current(device);
  std::string fault;
  bool has_asked = false;
  const auto ask = [&](const Trial& t, const auto& fault_of_trial, auto... how) {
    if (!fault.empty() || std::string_view(t.name).find(only) == std::string_view::npos) return;
    has_asked = true;
    fault = fault_of_trial(device, t, how...);
  };
  constexpr GateLayout kApart = GateLayout::kConcatenated, kPairs = GateLayout::kInterleaved;
  ask(kInOrder, fault_of_rows, Order::kDepth);
  ask(kGathered, fault_of_rows, Order::kColumns);
  ask(kExperts, fault_of_rows, Order::kDepth);
  ask(grad_trial(DType::kBF16), fault_of_grad);
  ask(grad_trial(DType::kF16), fault_of_grad);
  ask(kActivated, fault_of_activate, kApart);
  ask(kActivatedPairs, fault_of_activate, kPairs);
  ask(kActivatedGrad, fault_of_activate_grad, kApart);
  ask(kActivatedGradPairs, fault_of_activate_grad, kPairs);
  for (const CodesTrial& t : codes_trials()) ask(t.trial, t.fault);
  if (!has_asked) return "no product of the probe is named " + std::string(only);
  return fault;
}

}  // namespace
}  // namespace probed

std::string probe(const Device& device, std::string_view only) {
  if (!only.empty()) return probed::run_probe(device, only);
  static std::mutex mutex;
  static std::map<int, std::string> answers;
  const std::lock_guard lock(mutex);
  const auto found = answers.find(device.ordinal);
  if (found != answers.end()) return found->second;
  return answers[device.ordinal] = probed::run_probe(device, "");
}

}  // namespace sonicmoe::cuda::blackwell
