#include "cuda/layer/fp8_passes.h"

#include "core/fp8_layout.h"
#include "cuda/device/carver.h"
#include "cuda/layer/backward.h"
#include "cuda/layer/views.h"

namespace sonicmoe::cuda {
namespace {

constexpr std::int64_t kBlock = fp8::kBlock;

enum Counter : int { kCounterA, kCounterY };
// Tile counters of backward's fp8 products. The indices are those of backward.cc: its other steps
// use the other counters of the same array.
constexpr int kCounterInputGrad = 0;
constexpr int kCounterHiddenGrad = 4;

/// Quantised rows in token order, which a product gathers. Scales are (rows, depth/128), so that
/// the scales of one row are contiguous.
template <class Carver>
Fp8Rows take_tokens(Carver& carver, std::int64_t rows, std::int64_t depth) {
  auto* codes = carver.template take<std::uint8_t>(rows * depth);
  return {codes, carver.template take<float>(rows * (depth / kBlock)), rows, depth, 0};
}

/// Quantised rows in expert order at `base`, laid out as fp8::RowsLayout.
Fp8Rows ordered_rows(void* base, std::int64_t rows, std::int64_t depth) {
  const fp8::RowsLayout at = fp8::rows_layout(rows, depth);
  auto* bytes = static_cast<std::uint8_t*>(base);
  return {bytes + at.codes, reinterpret_cast<float*>(bytes + at.scales), rows, depth,
          at.scale_stride};
}
template <class Carver>
Fp8Rows take_rows(Carver& carver, std::int64_t rows, std::int64_t depth) {
  return ordered_rows(carver.template take<std::uint8_t>(fp8::rows_layout(rows, depth).bytes), rows,
                      depth);
}

/// The matrices in the buffer `fp8_weights` (fp8::WeightsLayout), one for each product.
struct QuantizedWeights {
  const Problem& p;
  const std::uint8_t* bytes;
  fp8::WeightsLayout at;

  QuantizedWeights(const Problem& problem, const Buffer& buffer)
      : p(problem),
        bytes(static_cast<const std::uint8_t*>(buffer.data)),
        at(fp8::weights_layout(problem)) {}

  std::int64_t parts() const { return gate_factor(p.activation.kind); }
  std::int64_t across() const { return p.hidden / kBlock; }
  std::int64_t down() const { return p.width / kBlock; }
  const float* scales(std::int64_t offset) const {
    return reinterpret_cast<const float*>(bytes + offset);
  }
  /// For A: gate and up, or up alone. K is d.
  Fp8Matrices up() const {
    return {.codes = bytes + at.up,
            .scales = scales(at.up_s),
            .experts = p.experts,
            .columns = p.width,
            .depth = p.hidden,
            .parts = parts(),
            .expert_scales = parts() * down() * across(),
            .column_scales = across(),
            .depth_scales = 1};
  }
  /// For dX~. K is the n of gate, then the n of up.
  Fp8Matrices up_transposed() const {
    return {.codes = bytes + at.up_t,
            .scales = scales(at.up_s),
            .experts = p.experts,
            .columns = p.hidden,
            .depth = parts() * p.width,
            .parts = 1,
            .expert_scales = parts() * down() * across(),
            .column_scales = 1,
            .depth_scales = across()};
  }
  /// For Y. K is n.
  Fp8Matrices down_matrices() const {
    return {.codes = bytes + at.down,
            .scales = scales(at.down_s),
            .experts = p.experts,
            .columns = p.hidden,
            .depth = p.width,
            .parts = 1,
            .expert_scales = down() * across(),
            .column_scales = down(),
            .depth_scales = 1};
  }
  /// For dH. K is d.
  Fp8Matrices down_transposed() const {
    return {.codes = bytes + at.down_t,
            .scales = scales(at.down_s),
            .experts = p.experts,
            .columns = p.width,
            .depth = p.hidden,
            .parts = 1,
            .expert_scales = down() * across(),
            .column_scales = 1,
            .depth_scales = down()};
  }
};

RowGroups groups_of(const PassContext& pass) {
  return {&pass.metadata, nullptr, pass.problem.experts, row_capacity(pass.problem)};
}

Fp8Rows kept_codes(const Problem& p, void* h) {
  if (h == nullptr || !fp8::keeps_codes(p)) return {};
  return ordered_rows(h, row_capacity(p), gate_factor(p.activation.kind) * p.width);
}
Tensor kept_elements(const Problem& p, void* h) {
  return h == nullptr || fp8::keeps_codes(p) ? Tensor{} : fp8_h_rows(p, h);
}

Fp8RowProduct up_product(const PassContext& pass, const ForwardArgs& args,
                         const Fp8ForwardScratch& scratch) {
  const Problem& p = pass.problem;
  return {.groups = groups_of(pass),
          .rows = scratch.x,
          .index = pass.metadata.row_token,
          .weights = QuantizedWeights(p, args.fp8_weights).up(),
          .epilogue = Fp8Activate{.a = scratch.a,
                                  .h_codes = kept_codes(p, args.h.data),
                                  .h = kept_elements(p, args.h.data),
                                  .bias_gate = args.weights.b_gate,
                                  .bias_up = args.weights.b_up,
                                  .activation = p.activation},
          .tile_counter = scratch.layer.counters + kCounterA};
}

Fp8RowProduct down_product(const PassContext& pass, const ForwardArgs& args,
                           const Fp8ForwardScratch& scratch, const Tensor& out) {
  const Problem& p = pass.problem;
  const bool scaled = p.form == RoutingForm::kGrouped;
  return {.groups = groups_of(pass),
          .rows = scratch.a,
          .index = nullptr,
          .weights = QuantizedWeights(p, args.fp8_weights).down_matrices(),
          .epilogue = StoreOutput{.out = out,
                                  .bias = args.weights.b_down,
                                  .scale = scaled ? args.routing.weights : Tensor{}},
          .tile_counter = scratch.layer.counters + kCounterY};
}

Fp8RowProduct hidden_grad_product(const BackwardCall& c, const Fp8BackwardScratch& scratch) {
  const Problem& p = c.problem();
  return {.groups = c.groups,
          .rows = scratch.dout,
          .index = c.pass.metadata.row_token,
          .weights = QuantizedWeights(p, c.args.fp8_weights).down_transposed(),
          .epilogue = Fp8ActivateGrad{.h_codes = kept_codes(p, c.args.h.data),
                                      .h = kept_elements(p, c.args.h.data),
                                      .dh_codes = scratch.dh,
                                      .dh = c.dh,
                                      .a = c.rows(c.scratch.a, p.width),
                                      .row_weight = c.scratch.row_weights,
                                      .score_parts = c.scratch.score_parts,
                                      .score_tiles = c.engine.score_tiles(p),
                                      .activation = p.activation,
                                      .layout = c.layout},
          .tile_counter = c.scratch.counters + kCounterHiddenGrad};
}

Fp8RowProduct input_grad_product(const BackwardCall& c, const Fp8BackwardScratch& scratch) {
  const Problem& p = c.problem();
  return {.groups = c.groups,
          .rows = scratch.dh,
          .index = nullptr,
          .weights = QuantizedWeights(p, c.args.fp8_weights).up_transposed(),
          .epilogue = StoreOutput{.out = c.rows(c.scratch.dx, p.hidden)},
          .tile_counter = c.scratch.counters + kCounterInputGrad};
}

}  // namespace

std::int64_t fp8_h_bytes(const Problem& p) {
  const std::int64_t capacity = row_capacity(p);
  if (fp8::keeps_codes(p)) return fp8::kept_h_layout(p, capacity).bytes;
  return gate_factor(p.activation.kind) * capacity * p.width * dtype_bytes(p.dtype);
}

Tensor fp8_h_rows(const Problem& p, void* data) {
  return tensor3(data, p.dtype, row_capacity(p), gate_factor(p.activation.kind), p.width);
}

Fp8ForwardScratch fp8_forward_scratch(const Problem& p, Pass pass, void* base) {
  const std::int64_t capacity = row_capacity(p);
  Carver<256> carver(base);
  Fp8ForwardScratch s{};
  s.x = take_tokens(carver, p.tokens, p.hidden);
  s.a = take_rows(carver, capacity, p.width);
  s.layer.y = carver.take<std::byte>(capacity * p.hidden * dtype_bytes(p.dtype));
  s.layer.counters = carver.take<unsigned>(kCounterBytes / 4);
  s.layer.metadata = carver.take<std::byte>(metadata_scratch(p));
  if (pass == Pass::kInference) {
    s.layer.saved = carver.take<std::byte>(metadata_layout(p, nullptr).bytes);
  }
  s.bytes = carver.used();
  return s;
}

Fp8BackwardScratch fp8_backward_scratch(const Problem& p, const Engine& engine, void* base) {
  Fp8BackwardScratch s{};
  s.layer = backward_scratch(p, engine, base);
  auto* more = base == nullptr ? nullptr : static_cast<std::byte*>(base) + s.layer.bytes;
  Carver<256> carver(more);
  s.dout = take_tokens(carver, p.tokens, p.hidden);
  s.dh = take_rows(carver, row_capacity(p), gate_factor(p.activation.kind) * p.width);
  s.bytes = s.layer.bytes + carver.used();
  return s;
}

void add_fp8_forward_steps(const PassContext& pass, const ForwardArgs& args,
                           const Fp8ForwardScratch& scratch, Steps& steps) {
  const Problem& p = pass.problem;
  const ForwardScratch& s = scratch.layer;
  steps.add("metadata", BuildMetadata{args.routing, {s.metadata, s.counters, kCounterBytes / 4}});
  steps.add("q(X)", QuantizeRows{args.x, scratch.x});
  steps.add("A", up_product(pass, args, scratch));
  if (p.form == RoutingForm::kGrouped) {
    // Row p of Y is row p of the output; rows in no group are zero.
    steps.add("Y", ClearRows{args.out});
    steps.add("Y", down_product(pass, args, scratch, args.out));
    return;
  }
  steps.add("Y",
            down_product(pass, args, scratch, tensor2(s.y, p.dtype, row_capacity(p), p.hidden)));
  steps.add("O",
            TokenSum{s.y, args.routing.weights, args.out, {0, p.tokens}, Start::kAfterPrevious});
}

void add_fp8_backward_steps(const PassContext& pass, const BackwardArgs& args,
                            const Fp8BackwardScratch& scratch, const Engine& engine, Steps& steps) {
  const BackwardCall c = backward_call(pass, args, scratch.layer, engine);
  add_backward_steps(c,
                     {.hidden_grad =
                          [&] {
                            steps.add("q(dO)", QuantizeRows{args.dout, scratch.dout});
                            steps.add("dH", hidden_grad_product(c, scratch));
                          },
                      .input_grad = [&] { steps.add("dX~", input_grad_product(c, scratch)); }},
                     steps);
}

}  // namespace sonicmoe::cuda
