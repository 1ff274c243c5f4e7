#include "verify/views.h"

#include <algorithm>
#include <optional>

#include "verify/convert.h"
#include "verify/routings.h"

namespace sonicmoe::verify {
namespace {

constexpr std::int64_t kPad = 8;

// Gate and up in one block, both with the strides of `view`; up begins `up_offset` elements after
// gate.
void add_to_one_block(const std::string& what, Tensor view, std::int64_t up_offset, bool gated,
                      Blocks& blocks, BlockView& gate, BlockView& up) {
  const std::int64_t elements = extent(view) + (gated ? up_offset : 0);
  Block& block = blocks.add(what, elements * dtype_bytes(view.dtype));
  if (gated) gate = {&block, view, 0};
  up = {&block, view, gated ? up_offset : 0};
}

// Gate and up of a tensor (E, G n, depth): W1, B_u, or without depth the biases.
void add_w1(const Case& c, const std::string& what, DType dtype, std::optional<std::int64_t> depth,
            Blocks& blocks, BlockView& gate, BlockView& up) {
  const Problem& p = c.problem;
  const bool gated = is_gated(p.activation.kind);
  const std::int64_t factor = gate_factor(p.activation.kind);
  const std::int64_t n = p.width;
  const std::int32_t rank = depth ? 3 : 2;
  const std::int64_t d = depth.value_or(1);
  Tensor view =
      rank == 3 ? tensor3(nullptr, dtype, p.experts, n, d) : tensor2(nullptr, dtype, p.experts, n);
  view.stride[0] = factor * n * d;
  switch (c.layout) {
    case Layout::kConcatenated:
      return add_to_one_block(what, view, n * d, gated, blocks, gate, up);
    case Layout::kInterleaved:
      view.stride[1] = factor * d;
      return add_to_one_block(what, view, d, gated, blocks, gate, up);
    case Layout::kTransposed:
      view.stride[1] = 1;
      if (rank == 3) view.stride[2] = factor * n;
      return add_to_one_block(what, view, n, gated, blocks, gate, up);
    case Layout::kPaired:
    case Layout::kPairedUp:
      view.stride[1] = factor;
      if (rank == 3) view.stride[2] = factor * n;
      return add_to_one_block(what, view, 1, gated, blocks, gate, up);
    default:
      break;
  }
  view = rank == 3 ? laid_out(c.layout, dtype, {p.experts, n, d})
                   : laid_out(c.layout, dtype, {p.experts, n});
  if (gated) gate = blocks.add_view(what + " (gate)", view);
  up = blocks.add_view(what + " (up)", view);
}

DType score_dtype(const Problem& p) { return p.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

template <class Result, class F>
Result map_weights(const WeightViews& w, F f) {
  return {f(w.gate), f(w.up), f(w.down), f(w.b_gate), f(w.b_up), f(w.b_down)};
}
template <class F>
Lora map_factors(const FactorViews& v, F f) {
  return {{f(v.up_a), f(v.up_b), f(v.up_gate_b), v.up_scale},
          {f(v.down_a), f(v.down_b), {}, v.down_scale}};
}
template <class F>
Routing map_routing(const RoutingViews& r, F f) {
  return {f(r.ids), f(r.weights), f(r.token), f(r.expert), f(r.row_begin), f(r.row_count)};
}
Tensor host_of(const BlockView& tensor) { return tensor.on_host(); }
Tensor device_of(const BlockView& tensor) { return tensor.on_device(); }

}  // namespace

Weights WeightViews::on_host() const { return map_weights<Weights>(*this, host_of); }
Weights WeightViews::on_device() const { return map_weights<Weights>(*this, device_of); }
Lora FactorViews::on_host() const { return map_factors(*this, host_of); }
Lora FactorViews::on_device() const { return map_factors(*this, device_of); }
Routing RoutingViews::on_host() const { return map_routing(*this, host_of); }
Routing RoutingViews::on_device() const { return map_routing(*this, device_of); }

Tensor laid_out(Layout layout, DType dtype, std::initializer_list<std::int64_t> shape) {
  Tensor t;
  t.dtype = dtype;
  t.rank = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  std::int64_t stride = 1;
  for (std::int32_t i = 0; i < t.rank; ++i) {
    const std::int32_t axis = layout == Layout::kReversed ? i : t.rank - 1 - i;
    t.stride[axis] = stride;
    stride *= t.shape[axis] + (layout == Layout::kPadded && i == 0 && t.rank > 1 ? kPad : 0);
  }
  return t;
}

BlockView add_expert_matrices(const Case& c, const std::string& what, DType dtype,
                              std::initializer_list<std::int64_t> shape, Blocks& blocks) {
  Tensor view = laid_out(c.layout, dtype, shape);
  if (c.layout == Layout::kTransposed || c.layout == Layout::kPaired) {
    view.stride[1] = 1;
    view.stride[2] = view.shape[1];
  }
  return blocks.add_view(what, view);
}

BlockView add_integers(const std::string& what, const Tensor& view,
                       const std::vector<std::int64_t>& values, Blocks& blocks) {
  const BlockView tensor = blocks.add_view(what, view);
  const Tensor t = tensor.on_host();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::int64_t offset = oracle::element_offset(t, static_cast<std::int64_t>(i));
    if (t.dtype == DType::kI64) {
      static_cast<std::int64_t*>(t.data)[offset] = values[i];
    } else {
      static_cast<std::int32_t*>(t.data)[offset] = static_cast<std::int32_t>(values[i]);
    }
  }
  return tensor;
}

RoutingViews add_routing(const Case& c, Blocks& blocks) {
  const Problem& p = c.problem;
  const Indices indices = make_indices(c);
  const auto line = [&](std::int64_t count) { return tensor1(nullptr, c.index_dtype, count); };
  RoutingViews r;
  switch (p.form) {
    case RoutingForm::kIds:
      r.ids = add_integers("ids", laid_out(c.layout, c.index_dtype, {p.tokens, p.top_k}),
                           indices.ids, blocks);
      r.weights = blocks.add_view("routing weights",
                                  laid_out(c.layout, score_dtype(p), {p.tokens, p.top_k}));
      break;
    case RoutingForm::kPairs:
      r.token = add_integers("token", line(p.capacity), indices.token, blocks);
      r.expert = add_integers("expert", line(p.capacity), indices.expert, blocks);
      r.weights = blocks.add_view("routing weights", tensor1(nullptr, score_dtype(p), p.capacity));
      break;
    case RoutingForm::kGrouped:
      r.row_begin = add_integers("row_begin", line(p.experts), indices.row_begin, blocks);
      r.row_count = add_integers("row_count", line(p.experts), indices.row_count, blocks);
      if (c.row_weights) {
        r.weights = blocks.add_view("row weights", tensor1(nullptr, score_dtype(p), p.tokens));
      }
      break;
  }
  return r;
}

WeightViews add_weights(const Case& c, const std::string& prefix, WeightDTypes dtypes,
                        Blocks& blocks) {
  const Problem& p = c.problem;
  WeightViews w;
  add_w1(c, prefix + "w1", dtypes.weights, p.hidden, blocks, w.gate, w.up);
  w.down =
      add_expert_matrices(c, prefix + "w2", dtypes.weights, {p.experts, p.hidden, p.width}, blocks);
  if (c.bias) {
    add_w1(c, prefix + "b1", dtypes.biases, std::nullopt, blocks, w.b_gate, w.b_up);
    w.b_down =
        blocks.add_view(prefix + "b2", laid_out(c.layout, dtypes.biases, {p.experts, p.hidden}));
  }
  return w;
}

FactorViews add_factors(const Case& c, const std::string& prefix, DType dtype, Blocks& blocks) {
  const Problem& p = c.problem;
  FactorViews f;
  // -1 keeps integers small.
  f.up_scale = c.data == Data::kRandom ? 1.5 : -1.0;
  f.down_scale = c.data == Data::kRandom ? 0.75 : -1.0;
  if (p.up_rank > 0) {
    f.up_a =
        add_expert_matrices(c, prefix + "up.a", dtype, {p.experts, p.up_rank, p.hidden}, blocks);
    add_w1(c, prefix + "up.b", dtype, p.up_rank, blocks, f.up_gate_b, f.up_b);
  }
  if (p.down_rank > 0) {
    f.down_a =
        add_expert_matrices(c, prefix + "down.a", dtype, {p.experts, p.down_rank, p.width}, blocks);
    f.down_b = add_expert_matrices(c, prefix + "down.b", dtype, {p.experts, p.hidden, p.down_rank},
                                   blocks);
  }
  return f;
}

}  // namespace sonicmoe::verify
