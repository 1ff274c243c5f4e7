#include "verify/inputs.h"

#include <cmath>
#include <limits>
#include <random>

#include "verify/convert.h"
#include "verify/oracle.h"
#include "verify/routings.h"

namespace sonicmoe::verify {
namespace {

constexpr std::int64_t kPad = 8;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A tensor whose rows are followed by foreign elements, or that lies in reverse order.
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

// Gate and up in one block, each `up_offset` elements after the other with these strides.
void place_shared(const std::string& what, Tensor view, std::int64_t up_offset, bool gated,
                  Blocks& blocks, Placed& gate, Placed& up) {
  const std::int64_t elements = extent(view) + (gated ? up_offset : 0);
  Block& block = blocks.add(what, elements * dtype_bytes(view.dtype));
  if (gated) gate = {&block, view, 0};
  up = {&block, view, gated ? up_offset : 0};
}

// W1's gate and up, or their biases' when rank is 2.
void place_w1(const Case& c, const std::string& what, DType dtype, std::int32_t rank,
              Blocks& blocks, Placed& gate, Placed& up) {
  const Problem& p = c.problem;
  const bool gated = is_gated(p.activation.kind);
  const std::int64_t factor = gate_factor(p.activation.kind);
  const std::int64_t n = p.width;
  const std::int64_t d = rank == 3 ? p.hidden : 1;
  Tensor view =
      rank == 3 ? tensor3(nullptr, dtype, p.experts, n, d) : tensor2(nullptr, dtype, p.experts, n);
  view.stride[0] = factor * n * d;
  switch (c.layout) {
    case Layout::kConcatenated:
      return place_shared(what, view, n * d, gated, blocks, gate, up);
    case Layout::kInterleaved:
      view.stride[1] = factor * d;
      return place_shared(what, view, d, gated, blocks, gate, up);
    case Layout::kTransposed:
      view.stride[1] = 1;
      if (rank == 3) view.stride[2] = factor * n;
      return place_shared(what, view, n, gated, blocks, gate, up);
    case Layout::kPaired:
      view.stride[1] = factor;
      if (rank == 3) view.stride[2] = factor * n;
      return place_shared(what, view, 1, gated, blocks, gate, up);
    default:
      break;
  }
  view = rank == 3 ? laid_out(c.layout, dtype, {p.experts, n, d})
                   : laid_out(c.layout, dtype, {p.experts, n});
  if (gated) gate = blocks.place(what + " (gate)", view);
  up = blocks.place(what + " (up)", view);
}

PlacedWeights place_weights(const Case& c, const std::string& prefix, DType dtype, Blocks& blocks) {
  const Problem& p = c.problem;
  PlacedWeights w;
  place_w1(c, prefix + "w1", dtype, 3, blocks, w.gate, w.up);
  Tensor down = laid_out(c.layout, dtype, {p.experts, p.hidden, p.width});
  if (c.layout == Layout::kTransposed || c.layout == Layout::kPaired) {
    down.stride[1] = 1;
    down.stride[2] = p.hidden;
  }
  w.down = blocks.place(prefix + "w2", down);
  if (c.bias) {
    place_w1(c, prefix + "b1", p.dtype, 2, blocks, w.b_gate, w.b_up);
    w.b_down = blocks.place(prefix + "b2", laid_out(c.layout, p.dtype, {p.experts, p.hidden}));
  }
  return w;
}

// Values of one case. Integers are thinned out so that no product sum leaves its type's exact
// range.
class Filler {
 public:
  Filler(const Case& c, std::uint64_t stream) : case_(c), engine_(seed_of(c) + stream) {}

  /// x, dO: N(0, 1) or small integers.
  void fill_rows(const Placed& placed) {
    const std::int64_t reach = case_.data == Data::kRoundings ? 3 : 1;
    fill(placed, [&] { return random() ? normal_(engine_) : integer(-reach, reach); });
  }
  /// Weights: N(0, 1)/sqrt(fan-in) or sparse integers.
  void fill_weights(const Placed& placed) {
    if (placed.block == nullptr) return;
    const double scale = 1.0 / std::sqrt(static_cast<double>(placed.view.shape[2]));
    const std::int64_t reach = case_.data == Data::kRoundings ? 2 : 1;
    const double terms = case_.data != Data::kRoundings       ? 2.0
                         : case_.problem.dtype == DType::kF16 ? 8.0
                                                              : 24.0;
    std::bernoulli_distribution present(std::min(
        1.0, terms / static_cast<double>(std::max(case_.problem.hidden, case_.problem.width))));
    fill(placed, [&] {
      if (random()) return scale * normal_(engine_);
      return present(engine_) ? integer(-reach, reach) : 0.0;
    });
  }
  /// Biases. Large ones make H = r(acc + b1) and Y = r(acc + b2) round.
  void fill_bias(const Placed& placed, double shift) {
    if (placed.block == nullptr) return;
    const std::int64_t reach = case_.data != Data::kRoundings       ? 1
                               : case_.problem.dtype == DType::kF16 ? 3000
                                                                    : 300;
    const double spread = shift == 0.0 ? 1.0 : 0.1;
    fill(placed,
         [&] { return random() ? shift + spread * normal_(engine_) : integer(-reach, reach); });
  }
  void fill_scores(const Placed& placed) {
    if (placed.block == nullptr) return;
    std::uniform_real_distribution<double> uniform(0.1, 1.0);
    fill(placed, [&] { return random() ? uniform(engine_) : score(); });
  }
  /// What accumulated gradients start from.
  void fill_grads(const Placed& placed) {
    if (placed.block == nullptr) return;
    fill(placed, [&] { return random() ? normal_(engine_) : integer(-9, 9); });
  }

 private:
  static std::uint64_t seed_of(const Case& c) {
    std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
    for (const char letter : c.name)
      hash = (hash ^ static_cast<std::uint8_t>(letter)) * 0x100000001b3u;
    return hash;
  }
  bool random() const { return case_.data == Data::kRandom; }
  double integer(std::int64_t low, std::int64_t high) {
    return static_cast<double>(std::uniform_int_distribution<std::int64_t>(low, high)(engine_));
  }
  double score() {
    constexpr double kScores[] = {-1.0, 1.0, 2.0, 3.0};
    return kScores[engine_() % (case_.data == Data::kRoundings ? 4 : 3)];
  }
  template <class Next>
  void fill(const Placed& placed, Next next) {
    std::vector<double> values(static_cast<std::size_t>(oracle::element_count(placed.view)));
    for (double& v : values) v = next();
    oracle::write(placed.on_host(), values);
  }

  const Case& case_;
  std::mt19937_64 engine_;
  std::normal_distribution<double> normal_;
};

void poison_row(const Placed& placed, std::int64_t row) {
  const Tensor t = placed.on_host();
  const std::int64_t width = t.rank == 1 ? 1 : t.shape[1];
  for (std::int64_t j = 0; j < width; ++j) {
    oracle::store(t.data, t.dtype, oracle::element_offset(t, row * width + j), kNaN);
  }
}

void poison_unused(const Case& c, const Tensors& tensors) {
  const Problem& p = c.problem;
  const std::vector<oracle::Row> rows = oracle::routed_rows(p, tensors.routing.on_host());
  const Placed& scores = tensors.routing.weights;
  std::vector<char> token_used(static_cast<std::size_t>(p.tokens), 0);
  std::vector<char> slot_used(static_cast<std::size_t>(oracle::element_count(scores.view)), 0);
  for (const oracle::Row& row : rows) {
    token_used[row.token] = 1;
    if (scores.block != nullptr) slot_used[row.slot] = 1;
  }
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    if (token_used[t] != 0) continue;
    poison_row(tensors.x, t);
    poison_row(tensors.dout, t);
  }
  const Tensor weights = scores.on_host();
  for (std::size_t i = 0; scores.block != nullptr && i < slot_used.size(); ++i) {
    if (slot_used[i] != 0) continue;
    oracle::store(weights.data, weights.dtype,
                  oracle::element_offset(weights, static_cast<std::int64_t>(i)), kNaN);
  }
}

DType score_dtype(const Problem& p) { return p.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

Placed place_integers(const std::string& what, Tensor view, const std::vector<std::int64_t>& values,
                      Blocks& blocks) {
  const Placed placed = blocks.place(what, view);
  const Tensor t = placed.on_host();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::int64_t offset = oracle::element_offset(t, static_cast<std::int64_t>(i));
    if (t.dtype == DType::kI64) {
      static_cast<std::int64_t*>(t.data)[offset] = values[i];
    } else {
      static_cast<std::int32_t*>(t.data)[offset] = static_cast<std::int32_t>(values[i]);
    }
  }
  return placed;
}

PlacedRouting place_routing(const Case& c, Blocks& blocks) {
  const Problem& p = c.problem;
  const Indices indices = make_indices(c);
  const auto line = [&](std::int64_t count) { return tensor1(nullptr, c.index_dtype, count); };
  PlacedRouting r;
  switch (p.form) {
    case RoutingForm::kIds:
      r.ids = place_integers("ids", laid_out(c.layout, c.index_dtype, {p.tokens, p.top_k}),
                             indices.ids, blocks);
      r.weights =
          blocks.place("routing weights", laid_out(c.layout, score_dtype(p), {p.tokens, p.top_k}));
      break;
    case RoutingForm::kPairs:
      r.token = place_integers("token", line(p.capacity), indices.token, blocks);
      r.expert = place_integers("expert", line(p.capacity), indices.expert, blocks);
      r.weights = blocks.place("routing weights", tensor1(nullptr, score_dtype(p), p.capacity));
      break;
    case RoutingForm::kGrouped:
      r.row_begin = place_integers("row_begin", line(p.experts), indices.row_begin, blocks);
      r.row_count = place_integers("row_count", line(p.experts), indices.row_count, blocks);
      if (c.row_weights) {
        r.weights = blocks.place("row weights", tensor1(nullptr, score_dtype(p), p.tokens));
      }
      break;
  }
  return r;
}

template <class Result, class F>
Result map_weights(const PlacedWeights& w, F f) {
  return {f(w.gate), f(w.up), f(w.down), f(w.b_gate), f(w.b_up), f(w.b_down)};
}
template <class F>
Routing map_routing(const PlacedRouting& r, F f) {
  return {f(r.ids), f(r.weights), f(r.token), f(r.expert), f(r.row_begin), f(r.row_count)};
}
Tensor host_of(const Placed& placed) { return placed.on_host(); }
Tensor device_of(const Placed& placed) { return placed.on_device(); }

}  // namespace

Weights PlacedWeights::on_host() const { return map_weights<Weights>(*this, host_of); }
Weights PlacedWeights::on_device() const { return map_weights<Weights>(*this, device_of); }
Routing PlacedRouting::on_host() const { return map_routing(*this, host_of); }
Routing PlacedRouting::on_device() const { return map_routing(*this, device_of); }

Tensors make_tensors(const Case& c, Blocks& blocks) {
  const Problem& p = c.problem;
  const Tensor rows = laid_out(c.layout, p.dtype, {p.tokens, p.hidden});
  Tensors t;
  t.x = blocks.place("x", rows);
  t.dout = blocks.place("dout", rows);
  t.routing = place_routing(c, blocks);
  t.weights = place_weights(c, "", p.dtype, blocks);
  t.out = blocks.place("out", rows);
  t.dx = blocks.place("dx", rows);
  if (t.routing.weights.block != nullptr) {
    t.dweights = blocks.place("dweights", t.routing.weights.view);
  }
  t.grads = place_weights(c, "d", c.grad_dtype, blocks);

  Filler filler(c, 0);
  filler.fill_rows(t.x);
  filler.fill_rows(t.dout);
  filler.fill_scores(t.routing.weights);
  for (const Placed* w : {&t.weights.gate, &t.weights.up, &t.weights.down}) filler.fill_weights(*w);
  const bool gated = t.weights.b_gate.block != nullptr;
  filler.fill_bias(t.weights.b_gate, c.bias_shift);
  filler.fill_bias(t.weights.b_up, gated ? 0.0 : c.bias_shift);
  filler.fill_bias(t.weights.b_down, 0.0);
  poison_unused(c, t);
  return t;
}

void fill_initial_grads(const Case& c, const PlacedWeights& grads) {
  Filler filler(c, 1);
  for (const Placed* g : {&grads.gate, &grads.up, &grads.down}) filler.fill_grads(*g);
}

}  // namespace sonicmoe::verify
