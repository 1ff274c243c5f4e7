#include "verify/inputs.h"

#include <cmath>
#include <limits>
#include <random>

#include "verify/convert.h"
#include "verify/oracle.h"

namespace sonicmoe::verify {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Generates the values of one case. In cases of integers most weights are 0, so that every sum of
// products is an integer that its type holds exactly.
class Filler {
 public:
  Filler(const Case& c, std::uint64_t stream) : case_(c), engine_(seed_of(c) + stream) {}

  /// x, dO: N(0, 1) or small integers.
  void fill_rows(const BlockView& tensor) {
    const std::int64_t largest = case_.data == Data::kRoundings ? 3 : 1;
    fill(tensor, [&] { return random() ? normal_(engine_) : integer(-largest, largest); });
    if (random() && fp8()) spread_blocks(tensor, {1, 128});
  }
  /// Weights: N(0, 1)/sqrt(fan-in) or sparse integers.
  void fill_weights(const BlockView& tensor, double factor) {
    if (tensor.block == nullptr) return;
    const double scale = factor / std::sqrt(static_cast<double>(tensor.view.shape[2]));
    const std::int64_t largest = case_.data == Data::kRoundings && !fp8() ? 2 : 1;
    const double terms = case_.data != Data::kRoundings       ? 2.0
                         : fp8()                              ? 6.0
                         : case_.problem.dtype == DType::kF16 ? 8.0
                                                              : 24.0;
    std::bernoulli_distribution present(std::min(
        1.0, terms / static_cast<double>(std::max(case_.problem.hidden, case_.problem.width))));
    fill(tensor, [&] {
      if (random()) return scale * normal_(engine_);
      return present(engine_) ? integer(-largest, largest) : 0.0;
    });
    if (random() && fp8()) spread_blocks(tensor, {128, 128});
  }
  /// A low-rank factor: as a weight, or integers of which `terms` a row are not 0 on average.
  void fill_factor(const BlockView& tensor, double terms) {
    if (tensor.block == nullptr) return;
    const auto depth = static_cast<double>(tensor.view.shape[2]);
    std::bernoulli_distribution present(std::min(1.0, terms / depth));
    fill(tensor, [&] {
      if (random()) return normal_(engine_) / std::sqrt(depth);
      return present(engine_) ? 2.0 * integer(0, 1) - 1.0 : 0.0;
    });
  }
  /// Biases. In kRoundings they are so large that H = r(acc + b1) and Y = r(acc + b2) are rounded.
  void fill_bias(const BlockView& tensor, double shift, double spread) {
    if (tensor.block == nullptr) return;
    const std::int64_t largest = case_.data != Data::kRoundings       ? 1
                                 : fp8()                              ? 10
                                 : case_.problem.dtype == DType::kF16 ? 3000
                                                                      : 300;
    fill(tensor,
         [&] { return random() ? shift + spread * normal_(engine_) : integer(-largest, largest); });
  }
  void fill_logits(const BlockView& tensor) {
    constexpr double kInf = std::numeric_limits<double>::infinity();
    constexpr double kSpecials[] = {kInf, -kInf, kNaN, 0.0, -0.0, 1e4, -1e4, 1e-7};
    const std::int64_t experts = case_.problem.experts;
    const Logits flavour = case_.router.logits;
    std::int64_t i = 0;
    fill(tensor, [&] {
      const std::int64_t token = i / experts, expert = i % experts;
      ++i;
      double v = normal_(engine_);
      if (flavour == Logits::kFewValues) v = integer(-1, 1);
      if (flavour == Logits::kSpecials && engine_() % 3 == 0) v = kSpecials[engine_() % 8];
      if (flavour == Logits::kEmptyRows && token % 3 != 0 && expert != token % (experts + 1)) {
        v = token % 2 == 0 ? -kInf : kNaN;
      }
      if (flavour == Logits::kOneHot && expert == experts / 2) v += 20.0;
      return v;
    });
  }
  void fill_scores(const BlockView& tensor) {
    if (tensor.block == nullptr) return;
    std::uniform_real_distribution<double> uniform(0.1, 1.0);
    fill(tensor, [&] { return random() ? uniform(engine_) : score(); });
  }
  /// Initial values of accumulated gradients.
  void fill_grads(const BlockView& tensor) {
    if (tensor.block == nullptr) return;
    fill(tensor, [&] { return random() ? normal_(engine_) : integer(-9, 9); });
  }

 private:
  static std::uint64_t seed_of(const Case& c) {
    std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
    for (const char letter : c.name)
      hash = (hash ^ static_cast<std::uint8_t>(letter)) * 0x100000001b3u;
    return hash;
  }
  bool random() const { return case_.data == Data::kRandom; }
  bool fp8() const { return case_.problem.precision == Precision::kFp8; }
  struct BlockShape {
    std::int64_t rows, cols;
  };
  /// Multiplies each block of the last two dimensions by a random power of two, so that blocks have
  /// different scales.
  void spread_blocks(const BlockView& tensor, BlockShape block) {
    const Tensor t = tensor.on_host();
    const std::int64_t rows = t.shape[t.rank - 2], cols = t.shape[t.rank - 1];
    std::vector<double> values = oracle::read(t);
    if (values.empty()) return;
    const std::int64_t down = (rows + block.rows - 1) / block.rows;
    const std::int64_t across = (cols + block.cols - 1) / block.cols;
    const std::int64_t matrices = static_cast<std::int64_t>(values.size()) / (rows * cols);
    std::vector<double> factors(static_cast<std::size_t>(matrices * down * across));
    for (double& f : factors) f = std::ldexp(1.0, static_cast<int>(engine_() % 4) - 2);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      const std::int64_t row = at / cols % rows, matrix = at / cols / rows;
      values[i] *= factors[(matrix * down + row / block.rows) * across + at % cols / block.cols];
    }
    oracle::write(t, values);
  }
  double integer(std::int64_t low, std::int64_t high) {
    return static_cast<double>(std::uniform_int_distribution<std::int64_t>(low, high)(engine_));
  }
  double score() {
    constexpr double kScores[] = {-1.0, 1.0, 2.0, 3.0};
    return kScores[engine_() % (case_.data == Data::kRoundings ? 4 : 3)];
  }
  template <class Next>
  void fill(const BlockView& tensor, Next next) {
    std::vector<double> values(static_cast<std::size_t>(oracle::element_count(tensor.view)));
    for (double& v : values) v = next();
    oracle::write(tensor.on_host(), values);
  }

  const Case& case_;
  std::mt19937_64 engine_;
  std::normal_distribution<double> normal_;
};

void poison_row(const BlockView& tensor, std::int64_t row) {
  const Tensor part = oracle::slice(tensor.on_host(), row);
  oracle::write(part, std::vector<double>(oracle::element_count(part), kNaN));
}

void poison_unused(const Case& c, const Tensors& tensors) {
  const Problem& p = c.problem;
  const std::vector<oracle::Row> rows = oracle::routed_rows(p, tensors.routing.on_host());
  const BlockView& scores = tensors.routing.weights;
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

/// For Case::cancelling. `rows` (T, K) is x or dO; dimension `depth` of the weights is K = 384. The
/// next two functions multiply the first 128 elements of K by 64 and copy them to the last 128. In
/// the weights the copy has the opposite sign: the products of the first and the last block cancel.
void cancel_rows(const BlockView& rows) {
  const Tensor t = rows.on_host();
  std::vector<double> values = oracle::read(t);
  for (std::size_t i = 0; i < values.size(); i += 384) {
    for (std::size_t j = 0; j < 128; ++j) values[i + 256 + j] = values[i + j] *= 64.0;
  }
  oracle::write(t, values);
}

void cancel_weights(const BlockView& weights, int depth) {
  const Tensor t = weights.on_host();
  const std::vector<double> values = oracle::read(t);
  const std::int64_t stride = depth == 2 ? 1 : t.shape[2];
  std::vector<double> changed = values;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    const std::int64_t k = at / stride % 384;
    if (k >= 256) changed[i] = -64.0 * values[static_cast<std::size_t>(at - 256 * stride)];
    if (k < 128) changed[i] = 64.0 * values[i];
  }
  oracle::write(t, changed);
}

}  // namespace

Tensors make_tensors(const Case& c, Blocks& blocks) {
  const Problem& p = c.problem;
  const Tensor rows = laid_out(c.layout, p.dtype, {p.tokens, p.hidden});
  Tensors t;
  t.x = blocks.add_view("x", rows);
  t.dout = blocks.add_view("dout", rows);
  t.routing = add_routing(c, blocks);
  t.weights = add_weights(c, "", {p.dtype, p.dtype}, blocks);
  t.factors = add_factors(c, "", p.f32_factors ? DType::kF32 : p.dtype, blocks);
  t.out = blocks.add_view("out", rows);
  t.dx = blocks.add_view("dx", rows);
  if (t.routing.weights.block != nullptr) {
    t.dweights = blocks.add_view("dweights", t.routing.weights.view);
  }
  const bool adds = c.grad_mode == GradMode::kAccumulate;
  t.grads = add_weights(c, "d", {c.grad_dtype, adds ? c.grad_dtype : p.dtype}, blocks);

  t.factor_grads = add_factors(c, "d", c.grad_dtype, blocks);

  Filler filler(c, 0);
  filler.fill_rows(t.x);
  filler.fill_rows(t.dout);
  filler.fill_scores(t.routing.weights);
  // With bias_shift, the input of the activation stays near the shift (small weights, small spread
  // of the bias) and b2 is 0, so that the activation alone decides the output.
  const bool shifted = c.bias_shift != 0.0;
  const bool gated = is_gated(c.problem.activation.kind);
  const BlockView& shifted_weight = gated ? t.weights.gate : t.weights.up;
  for (const BlockView* w : {&t.weights.gate, &t.weights.up, &t.weights.down}) {
    filler.fill_weights(*w, shifted && w == &shifted_weight ? 0.1 : 1.0);
  }
  filler.fill_bias(t.weights.b_gate, c.bias_shift, shifted ? 0.1 : 1.0);
  filler.fill_bias(t.weights.b_up, gated ? 0.0 : c.bias_shift, shifted && !gated ? 0.1 : 1.0);
  filler.fill_bias(t.weights.b_down, 0.0, shifted ? 0.0 : 1.0);
  const FactorViews& f = t.factors;
  for (const BlockView* a : {&f.up_a, &f.down_a}) filler.fill_factor(*a, 1.0);
  for (const BlockView* b : {&f.up_b, &f.up_gate_b, &f.down_b}) filler.fill_factor(*b, 0.25);
  if (c.cancelling) {
    cancel_rows(t.x);
    cancel_weights(t.weights.gate, 2);
    cancel_weights(t.weights.up, 2);
    cancel_rows(t.dout);
    cancel_weights(t.weights.down, 1);
  }
  poison_unused(c, t);
  return t;
}

void fill_operands(const Case& c, const BlockView& a, const BlockView& b) {
  Filler filler(c, 0);
  filler.fill_rows(a);
  if (b.view.rank == 3) {
    filler.fill_weights(b, 1.0);
  } else {
    filler.fill_rows(b);
  }
}

void fill_logits(const Case& c, const BlockView& logits) { Filler(c, 0).fill_logits(logits); }

void fill_normal(const Case& c, std::uint64_t stream, const BlockView& tensor) {
  Filler(c, stream).fill_rows(tensor);
}

void fill_initial_grads(const Case& c, const Tensors& tensors) {
  Filler filler(c, 1);
  const WeightViews& grads = tensors.grads;
  const FactorViews& factors = tensors.factor_grads;
  for (const BlockView* g :
       {&grads.gate, &grads.up, &grads.down, &grads.b_gate, &grads.b_up, &grads.b_down,
        &factors.up_a, &factors.up_b, &factors.up_gate_b, &factors.down_a, &factors.down_b}) {
    filler.fill_grads(*g);
  }
}

}  // namespace sonicmoe::verify
