#include "bench_layer.h"

#include <algorithm>
#include <cmath>

#include "sonicmoe/routing.h"

namespace sonicmoe::cli {
namespace {

DType score_dtype(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

constexpr double kSkew = 1.0;

}  // namespace

double bench_bytes(const Problem& p, const Exec& exec) {
  const auto d = static_cast<double>(p.hidden), n = static_cast<double>(p.width);
  const double rows = static_cast<double>(p.tokens * p.top_k);
  const auto G = static_cast<double>(gate_factor(p.activation.kind));
  const double weights = 2 * (G + 1) * static_cast<double>(p.experts) * n * d;
  const double tokens = 4 * static_cast<double>(p.tokens) * d;
  // H is counted in the tensors' dtype, although fp8 keeps fewer bytes.
  const std::int64_t scratch = std::max(moe_sizes(p, Pass::kForward, exec).scratch_bytes,
                                        moe_sizes(p, Pass::kBackward, exec).scratch_bytes);
  return static_cast<double>(dtype_bytes(p.dtype)) * (weights + tokens + rows * G * n) +
         static_cast<double>(scratch + fp8_weights_bytes(p, exec));
}

BenchLayer::BenchLayer(const LayerShape& shape, const Problem& problem, BenchRouting routing,
                       const Target& target)
    : problem_(problem), target_(target) {
  const DType t = problem.dtype;
  const std::int64_t T = shape.tokens, d = shape.hidden, n = shape.width, E = shape.experts;
  const double up_scale = 1 / std::sqrt(static_cast<double>(d));
  const bool gated = is_gated(problem.activation.kind);
  const verify::Memory& memory = target.memory;
  const auto empty = [&](std::vector<std::int64_t> sizes) {
    return OwnedTensor(memory, t, std::move(sizes));
  };
  const auto normal = [&](std::vector<std::int64_t> sizes, std::uint64_t seed, double scale) {
    OwnedTensor tensor = empty(std::move(sizes));
    tensor.fill_normal(seed, scale);
    return tensor;
  };
  route_tokens(shape, routing);
  x_ = normal({T, d}, 1, 1.0);
  dout_ = normal({T, d}, 2, 1.0);
  if (gated) gate_ = normal({E, n, d}, 3, up_scale);
  up_ = normal({E, n, d}, 4, up_scale);
  down_ = normal({E, d, n}, 5, 1 / std::sqrt(static_cast<double>(n)));
  out_ = empty({T, d});
  dx_ = empty({T, d});
  if (gated) dgate_ = empty({E, n, d});
  dup_ = empty({E, n, d});
  ddown_ = empty({E, d, n});

  const Sizes sizes = moe_sizes(problem_, Pass::kForward, target.exec);
  const Sizes backward_sizes = moe_sizes(problem_, Pass::kBackward, target.exec);
  h_ = Block(memory, sizes.h_bytes);
  saved_ = Block(memory, sizes.saved_bytes);
  scratch_ = Block(memory, std::max(sizes.scratch_bytes, backward_sizes.scratch_bytes));

  forward_.x = x_.view();
  forward_.routing = {ids_.view(), weights_.view(), token_.view(), expert_.view(), {}, {}};
  forward_.weights = {gate_.view(), up_.view(), down_.view(), {}, {}, {}};
  forward_.out = out_.view();
  forward_.h = h_.buffer();
  forward_.saved = saved_.buffer();
  forward_.scratch = scratch_.buffer();
  backward_.x = forward_.x;
  backward_.routing = forward_.routing;
  backward_.weights = forward_.weights;
  backward_.dout = dout_.view();
  backward_.h = forward_.h;
  backward_.saved = forward_.saved;
  backward_.scratch = forward_.scratch;
  backward_.dx = dx_.view();
  backward_.dweights = dweights_.view();
  backward_.grads = {dgate_.view(), dup_.view(), ddown_.view(), {}, {}, {}};
  if (problem_.precision == Precision::kTensors) return;
  fp8_weights_ = Block(memory, fp8_weights_bytes(problem_, target.exec));
  forward_.fp8_weights = backward_.fp8_weights = fp8_weights_.buffer();
  quantize_weights();
}

void BenchLayer::quantize_weights() const {
  sonicmoe::quantize_weights(problem_, forward_.weights, fp8_weights_.buffer(), target_.exec);
}

void BenchLayer::forward(KernelObserver* observer) const {
  Exec exec = target_.exec;
  exec.observer = observer;
  moe_forward(problem_, forward_, exec);
}

void BenchLayer::backward(KernelObserver* observer) const {
  Exec exec = target_.exec;
  exec.observer = observer;
  moe_backward(problem_, backward_, exec);
}

void BenchLayer::route_tokens(const LayerShape& shape, BenchRouting routing) {
  const DType logits_dtype = problem_.dtype == DType::kF64 ? DType::kF64 : DType::kBF16;
  const double skew = routing == BenchRouting::kSkewed ? kSkew : 0.0;
  const OwnedTensor logits = random_logits(target_.memory, shape, logits_dtype, skew, 6);
  if (routing == BenchRouting::kRounded) {
    fill_pairs(shape, logits.view());
    return;
  }
  const DType scores = score_dtype(problem_.dtype);
  ids_ = OwnedTensor(target_.memory, DType::kI32, {shape.tokens, shape.top_k});
  weights_ = OwnedTensor(target_.memory, scores, {shape.tokens, shape.top_k});
  dweights_ = OwnedTensor(target_.memory, scores, {shape.tokens, shape.top_k});
  route({.top_k = shape.top_k}, logits.view(), ids_.view(), weights_.view(), target_.exec);
  rows_ = shape.tokens * shape.top_k;
}

void BenchLayer::fill_pairs(const LayerShape& shape, const Tensor& logits) {
  const RoundOptions options{.route = {.top_k = shape.top_k}};
  const std::int64_t capacity = round_capacity(options, shape.tokens, shape.experts);
  const DType scores = score_dtype(problem_.dtype);
  token_ = OwnedTensor(target_.memory, DType::kI32, {capacity});
  expert_ = OwnedTensor(target_.memory, DType::kI32, {capacity});
  weights_ = OwnedTensor(target_.memory, scores, {capacity});
  dweights_ = OwnedTensor(target_.memory, scores, {capacity});
  offsets_ = OwnedTensor(target_.memory, DType::kI64, {shape.experts + 1});
  const Block scratch(target_.memory,
                      round_scratch_bytes(options, shape.tokens, shape.experts, target_.exec));
  token_round(options, logits, {token_.view(), expert_.view(), weights_.view(), offsets_.view()},
              scratch.buffer(), target_.exec);
  rows_ = offsets_.read<std::int64_t>().back();
  problem_.form = RoutingForm::kPairs;
  problem_.top_k = 0;
  problem_.capacity = capacity;
}

}  // namespace sonicmoe::cli
