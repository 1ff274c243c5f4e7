#include "bench_layer.h"

#include <algorithm>
#include <cmath>

#include "sonicmoe/routing.h"

namespace sonicmoe::cli {
namespace {

OwnedTensor normal(DType dtype, std::vector<std::int64_t> shape, std::uint64_t seed, double scale) {
  OwnedTensor t(dtype, std::move(shape));
  t.fill_normal(seed, scale);
  return t;
}

DType score_dtype(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

constexpr double kSkew = 1.0;

}  // namespace

double bench_bytes(const Problem& p) {
  const auto d = static_cast<double>(p.hidden), n = static_cast<double>(p.width);
  const double rows = static_cast<double>(p.tokens * p.top_k);
  const auto G = static_cast<double>(gate_factor(p.activation.kind));
  const double weights = 2 * (G + 1) * static_cast<double>(p.experts) * n * d;
  const double activations = 4 * static_cast<double>(p.tokens) * d + rows * (G * n + d + n);
  return static_cast<double>(dtype_bytes(p.dtype)) * (weights + activations);
}

BenchLayer::BenchLayer(const LayerShape& shape, const Problem& problem, BenchRouting routing,
                       const Exec& exec)
    : problem_(problem), exec_(exec) {
  const DType t = problem.dtype;
  const std::int64_t T = shape.tokens, d = shape.hidden, n = shape.width, E = shape.experts;
  const double up_scale = 1 / std::sqrt(static_cast<double>(d));
  const bool gated = is_gated(problem.activation.kind);
  route_tokens(shape, routing);
  x_ = normal(t, {T, d}, 1, 1.0);
  dout_ = normal(t, {T, d}, 2, 1.0);
  if (gated) gate_ = normal(t, {E, n, d}, 3, up_scale);
  up_ = normal(t, {E, n, d}, 4, up_scale);
  down_ = normal(t, {E, d, n}, 5, 1 / std::sqrt(static_cast<double>(n)));
  out_ = OwnedTensor(t, {T, d});
  dx_ = OwnedTensor(t, {T, d});
  if (gated) dgate_ = OwnedTensor(t, {E, n, d});
  dup_ = OwnedTensor(t, {E, n, d});
  ddown_ = OwnedTensor(t, {E, d, n});

  const Sizes sizes = moe_sizes(problem_, Pass::kForward, exec_);
  const Sizes backward_sizes = moe_sizes(problem_, Pass::kBackward, exec_);
  h_ = Block(sizes.h_bytes);
  saved_ = Block(sizes.saved_bytes);
  scratch_ = Block(std::max(sizes.scratch_bytes, backward_sizes.scratch_bytes));

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
}

void BenchLayer::route_tokens(const LayerShape& shape, BenchRouting routing) {
  const DType logits_dtype = problem_.dtype == DType::kF64 ? DType::kF64 : DType::kBF16;
  const double skew = routing == BenchRouting::kSkewed ? kSkew : 0.0;
  const OwnedTensor logits = random_logits(shape, logits_dtype, skew, 6);
  if (routing == BenchRouting::kRounded) {
    fill_pairs(shape, logits.view());
    return;
  }
  const DType scores = score_dtype(problem_.dtype);
  ids_ = OwnedTensor(DType::kI32, {shape.tokens, shape.top_k});
  weights_ = OwnedTensor(scores, {shape.tokens, shape.top_k});
  dweights_ = OwnedTensor(scores, {shape.tokens, shape.top_k});
  route({.top_k = shape.top_k}, logits.view(), ids_.view(), weights_.view(), exec_);
  rows_ = shape.tokens * shape.top_k;
}

void BenchLayer::fill_pairs(const LayerShape& shape, const Tensor& logits) {
  const RoundOptions options{.route = {.top_k = shape.top_k}};
  const std::int64_t capacity = round_capacity(options, shape.tokens, shape.experts);
  const DType scores = score_dtype(problem_.dtype);
  token_ = OwnedTensor(DType::kI32, {capacity});
  expert_ = OwnedTensor(DType::kI32, {capacity});
  weights_ = OwnedTensor(scores, {capacity});
  dweights_ = OwnedTensor(scores, {capacity});
  offsets_ = OwnedTensor(DType::kI64, {shape.experts + 1});
  const Block scratch(round_scratch_bytes(options, shape.tokens, shape.experts, exec_));
  token_round(options, logits, {token_.view(), expert_.view(), weights_.view(), offsets_.view()},
              scratch.buffer(), exec_);
  rows_ = offsets_.data<std::int64_t>()[shape.experts];
  problem_.form = RoutingForm::kPairs;
  problem_.top_k = 0;
  problem_.capacity = capacity;
}

}  // namespace sonicmoe::cli
