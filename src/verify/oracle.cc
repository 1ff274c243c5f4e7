#include "verify/oracle.h"

#include <algorithm>
#include <tuple>

#include "verify/oracle_formulas.h"
#include "verify/oracle_fp8.h"

namespace sonicmoe::oracle {
namespace {

bool in_range(std::int64_t value, std::int64_t end) { return value >= 0 && value < end; }

std::vector<Row> rows_of_ids(const Problem& p, const Routing& routing) {
  std::vector<Row> rows;
  for (std::int64_t slot = 0; slot < p.tokens * p.top_k; ++slot) {
    const std::int64_t expert = load_integer(routing.ids, slot);
    if (in_range(expert, p.experts)) rows.push_back({slot / p.top_k, expert, slot, 0.0});
  }
  return rows;
}

std::vector<Row> rows_of_pairs(const Problem& p, const Routing& routing) {
  std::vector<Row> rows;
  for (std::int64_t slot = 0; slot < p.capacity; ++slot) {
    const std::int64_t token = load_integer(routing.token, slot);
    const std::int64_t expert = load_integer(routing.expert, slot);
    if (in_range(token, p.tokens) && in_range(expert, p.experts)) {
      rows.push_back({token, expert, slot, 0.0});
    }
  }
  return rows;
}

// Ranges are clamped to the buffer without computing begin + count, which may overflow.
std::vector<Row> rows_of_groups(const Problem& p, const Routing& routing) {
  std::vector<Row> rows;
  for (std::int64_t e = 0; e < p.experts; ++e) {
    const std::int64_t begin = load_integer(routing.row_begin, e);
    const std::int64_t count = std::max<std::int64_t>(load_integer(routing.row_count, e), 0);
    for (std::int64_t t = 0; t < p.tokens; ++t) {
      if (t >= begin && (begin >= 0 ? t - begin < count : t < begin + count)) {
        rows.push_back({t, e, t, 1.0});
      }
    }
  }
  return rows;
}

std::vector<Matrix<double>> read_experts(const Tensor& t) {
  std::vector<Matrix<double>> experts;
  if (t.data == nullptr) return experts;
  for (std::int64_t e = 0; e < t.shape[0]; ++e) experts.push_back(read_matrix(slice(t, e)));
  return experts;
}

Factors read_factors(const LowRank& f) {
  return {read_experts(f.a), read_experts(f.b), read_experts(f.gate_b), f.scale};
}

// Whether the operands of the products are quantised.
enum class Coded { kNo, kYes };

// The layer's inputs in the type of the sums, and the steps over its experts. In fp8 the operands
// of the products for H, Y, dA' and dX~ are quantised, and so is the kept H; everything else is as
// in bf16.
template <class Real>
class Run {
 public:
  Run(const Layer& layer, DType storage, Coded coded, Accumulator accumulator)
      : layer_(layer),
        problem_(layer.problem),
        storage_(storage),
        coded_(coded),
        accumulator_(accumulator) {
    first_.assign(static_cast<std::size_t>(problem_.experts) + 1, 0);
    for (const Row& row : layer.rows) ++first_[row.expert + 1];
    for (std::int64_t e = 0; e < problem_.experts; ++e) first_[e + 1] += first_[e];
  }

  Forward forward() const {
    Forward result;
    const auto row_count = static_cast<std::int64_t>(layer_.rows.size());
    result.h.up = Matrix<double>(row_count, problem_.width);
    if (!layer_.gate.empty()) result.h.gate = Matrix<double>(row_count, problem_.width);
    Matrix<Real> y(row_count, problem_.hidden);
    const bool grouped = problem_.form == RoutingForm::kGrouped;
    for (std::int64_t e = 0; e < problem_.experts; ++e) {
      const Matrix<Real> x = gathered(layer_.x, e);
      const Matrix<Real> coded_x = coded(x);
      const Factors& up = layer_.lora_up;
      const Matrix<Real> p = inner(up, x, columns_of(up.a, e));
      Hidden<Real> h;
      if (!layer_.gate.empty()) {
        h.gate = up_projection(storage_, coded_x, weight(layer_.gate, e), bias(layer_.b_gate, e),
                               accumulator_, {p, columns_of(up.gate_b, e)});
        put_rows(kept(h.gate), e, result.h.gate);
      }
      h.up = up_projection(storage_, coded_x, weight(layer_.up, e), bias(layer_.b_up, e),
                           accumulator_, {p, columns_of(up.b, e)});
      put_rows(kept(h.up), e, result.h.up);
      const Matrix<Real> a = activated(storage_, problem_.activation, h);
      const Factors& down = layer_.lora_down;
      Matrix<Real> sum = down_projection_sum(
          coded(a), weight(layer_.down, e), bias(layer_.b_down, e), accumulator_,
          {inner(down, a, columns_of(down.a, e)), columns_of(down.b, e)});
      // Grouped rows are scaled, then rounded once. The other forms round Y and then O.
      put_rows(grouped ? std::move(sum) : rounded(storage_, std::move(sum)), e, y);
    }
    result.out = cast<double>(sum_by_token(y, scores(0, row_count)));
    return result;
  }

  Backward backward(const HiddenRows& hidden, const Matrix<double>& dout_tokens) const {
    Backward result;
    result.dweights.assign(static_cast<std::size_t>(layer_.slots), 0.0);
    if (!layer_.gate.empty()) result.db_gate = Matrix<double>(problem_.experts, problem_.width);
    result.db_up = Matrix<double>(problem_.experts, problem_.width);
    result.db_down = Matrix<double>(problem_.experts, problem_.hidden);
    const auto row_count = static_cast<std::int64_t>(layer_.rows.size());
    Matrix<Real> dx_rows(row_count, problem_.hidden);
    for (std::int64_t e = 0; e < problem_.experts; ++e) {
      const Matrix<Real> x = gathered(layer_.x, e);
      const Matrix<Real> dout = gathered(dout_tokens, e);
      Hidden<Real> h;
      h.up = take_rows(hidden.up, e);
      if (!layer_.gate.empty()) h.gate = take_rows(hidden.gate, e);
      const std::vector<Real> s = scores(first_[e], first_[e + 1]);
      const Term<Real> back{inner(layer_.lora_down, dout, rows_of(layer_.lora_down.b, e)),
                            rows_of(layer_.lora_down.a, e)};
      const Matrix<Real> da_unscaled =
          sum_with(product(coded(dout), weight(layer_.down, e), accumulator_), back);
      const ActivationGrad<Real> grad =
          activation_grad(storage_, problem_.activation, h, da_unscaled, s);
      put_dscores(grad.dscores, dout, e, result);
      result.ddown.push_back(cast<double>(weight_grad(dout, grad.scaled)));
      result.dup.push_back(cast<double>(weight_grad(grad.dh.up, x)));
      put_bias(up_bias_grad(grad.dh.up), e, result.db_up);
      put_bias(down_bias_grad(dout, s), e, result.db_down);
      Matrix<Real> w_gate;
      if (!layer_.gate.empty()) {
        result.dgate.push_back(cast<double>(weight_grad(grad.dh.gate, x)));
        put_bias(up_bias_grad(grad.dh.gate), e, result.db_gate);
        w_gate = weight(layer_.gate, e);
      }
      const Hidden<Real> dh{coded(grad.dh.gate), coded(grad.dh.up)};
      const Term<Real> term{inner_of_dh(grad.dh, e), rows_of(layer_.lora_up.a, e)};
      put_rows(input_grad(storage_, dh, w_gate, weight(layer_.up, e), accumulator_, term), e,
               dx_rows);
      put_down_factors(dout, grad.scaled, back.inner, e, result.dlora_down);
      put_up_factors(x, grad.dh, term.inner, e, result.dlora_up);
    }
    result.dx = cast<double>(sum_by_token(dx_rows, std::vector<Real>(layer_.rows.size(), Real(1))));
    return result;
  }

 private:
  Matrix<Real> gathered(const Matrix<double>& tokens, std::int64_t e) const {
    Matrix<Real> out(first_[e + 1] - first_[e], tokens.cols);
    for (std::int64_t i = 0; i < out.rows; ++i) {
      const double* from = tokens.row(layer_.rows[first_[e] + i].token);
      std::transform(from, from + out.cols, out.row(i), [](double v) { return Real(v); });
    }
    return out;
  }
  Matrix<Real> in_blocks(Matrix<Real> m, BlockShape block) const {
    if (coded_ == Coded::kNo || m.empty()) return m;
    return cast<Real>(restored(quantise(cast<double>(m), block), block));
  }
  Matrix<Real> coded(Matrix<Real> m) const { return in_blocks(std::move(m), kRowBlocks); }
  Matrix<Real> kept(const Matrix<Real>& h) const {
    return problem_.kept_h == KeptH::kPrecision ? coded(h) : h;
  }
  Matrix<Real> weight(const std::vector<Matrix<double>>& experts, std::int64_t e) const {
    return in_blocks(cast<Real>(experts[e]), kWeightBlocks);
  }
  // A factor of expert e, rounded to the tensors' dtype; empty without factors.
  Matrix<Real> rows_of(const std::vector<Matrix<double>>& factor, std::int64_t e) const {
    return factor.empty() ? Matrix<Real>() : rounded(storage_, cast<Real>(factor[e]));
  }
  Matrix<Real> columns_of(const std::vector<Matrix<double>>& factor, std::int64_t e) const {
    return transposed(rows_of(factor, e));
  }
  Matrix<Real> inner(const Factors& factors, const Matrix<Real>& rows,
                     const Matrix<Real>& factor) const {
    if (factors.a.empty()) return {};
    return inner_rows(storage_, Real(factors.scale), rows, factor);
  }
  // V: one sum over gate and up, rounded once.
  Matrix<Real> inner_of_dh(const Hidden<Real>& dh, std::int64_t e) const {
    const Factors& up = layer_.lora_up;
    if (up.a.empty()) return {};
    Matrix<Real> sum(dh.up.rows, up.a[e].rows);
    if (!dh.gate.empty()) add_product(sum, dh.gate, rows_of(up.gate_b, e));
    add_product(sum, dh.up, rows_of(up.b, e));
    for (Real& v : sum.values) v *= Real(up.scale);
    return rounded(storage_, std::move(sum));
  }
  void put_down_factors(const Matrix<Real>& dout, const Matrix<Real>& scaled,
                        const Matrix<Real>& back, std::int64_t e, Factors& grads) const {
    const Factors& down = layer_.lora_down;
    if (down.a.empty()) return;
    const Matrix<Real> u = inner(down, scaled, columns_of(down.a, e));
    grads.a.push_back(cast<double>(weight_grad(back, scaled)));
    grads.b.push_back(cast<double>(weight_grad(dout, u)));
  }
  void put_up_factors(const Matrix<Real>& x, const Hidden<Real>& dh, const Matrix<Real>& v,
                      std::int64_t e, Factors& grads) const {
    const Factors& up = layer_.lora_up;
    if (up.a.empty()) return;
    const Matrix<Real> p = inner(up, x, columns_of(up.a, e));
    grads.a.push_back(cast<double>(weight_grad(v, x)));
    grads.b.push_back(cast<double>(weight_grad(dh.up, p)));
    if (!dh.gate.empty()) grads.gate_b.push_back(cast<double>(weight_grad(dh.gate, p)));
  }
  std::vector<Real> bias(const Matrix<double>& b, std::int64_t e) const {
    if (b.empty()) return {};
    return std::vector<Real>(b.row(e), b.row(e) + b.cols);
  }
  std::vector<Real> scores(std::int64_t begin, std::int64_t end) const {
    std::vector<Real> s;
    for (std::int64_t i = begin; i < end; ++i) s.push_back(Real(layer_.rows[i].weight));
    return s;
  }
  template <class To>
  void put_rows(const Matrix<Real>& m, std::int64_t e, Matrix<To>& all) const {
    std::transform(m.values.begin(), m.values.end(), all.row(first_[e]),
                   [](Real v) { return static_cast<To>(v); });
  }
  Matrix<Real> take_rows(const Matrix<double>& all, std::int64_t e) const {
    Matrix<Real> m(first_[e + 1] - first_[e], all.cols);
    std::transform(all.row(first_[e]), all.row(first_[e + 1]), m.values.begin(),
                   [](double v) { return Real(v); });
    return m;
  }
  static void put_bias(const std::vector<Real>& b, std::int64_t e, Matrix<double>& all) {
    std::transform(b.begin(), b.end(), all.row(e), [](Real v) { return static_cast<double>(v); });
  }
  void put_dscores(const std::vector<Real>& dscores, const Matrix<Real>& dout, std::int64_t e,
                   Backward& result) const {
    std::vector<Real> term(dscores.size(), Real(0));
    if (!layer_.b_down.empty()) term = bias_term_of_dscores(dout, bias(layer_.b_down, e));
    for (std::size_t i = 0; i < dscores.size(); ++i) {
      result.dweights[layer_.rows[first_[e] + i].slot] = static_cast<double>(dscores[i] + term[i]);
    }
  }
  // Kernels O and dX: r(sum over a token's rows), in slot order for ids, else in row order.
  Matrix<Real> sum_by_token(const Matrix<Real>& rows, const std::vector<Real>& factors) const {
    std::vector<std::int64_t> order(layer_.rows.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int64_t>(i);
    if (problem_.form == RoutingForm::kIds) {
      std::sort(order.begin(), order.end(), [this](std::int64_t a, std::int64_t b) {
        return layer_.rows[a].slot < layer_.rows[b].slot;
      });
    }
    Matrix<Real> sum(problem_.tokens, problem_.hidden);
    for (const std::int64_t p : order) {
      Real* out = sum.row(layer_.rows[p].token);
      for (std::int64_t j = 0; j < sum.cols; ++j) out[j] += factors[p] * rows(p, j);
    }
    return rounded(storage_, std::move(sum));
  }

  const Layer& layer_;
  const Problem& problem_;
  const DType storage_;
  const Coded coded_;
  const Accumulator accumulator_;
  std::vector<std::int64_t> first_;  // first row of each expert
};

// Calls f with the Run that the precision asks for.
template <class F>
auto with_run(const Layer& layer, Precision precision, F f) {
  const DType dtype = layer.problem.dtype;
  if (precision == Precision::kExact) {
    return dtype == DType::kF64 ? f(Run<long double>(layer, DType::kF64, Coded::kNo, {}))
                                : f(Run<double>(layer, DType::kF64, Coded::kNo, {}));
  }
  const bool fp8 = layer.problem.precision == sonicmoe::Precision::kFp8;
  const Coded coded = fp8 ? Coded::kYes : Coded::kNo;
  if (precision == Precision::kRounded || dtype == DType::kF64) {
    return f(Run<double>(layer, dtype, coded, {}));
  }
  const int bits = fp8 && precision == Precision::kUnpromoted ? 14 : 0;
  return f(Run<float>(layer, dtype, coded, {.bits = bits}));
}

}  // namespace

Matrix<double> read_matrix(const Tensor& t) {
  Matrix<double> m;
  if (t.data == nullptr) return m;
  m.rows = t.shape[0];
  m.cols = t.rank == 1 ? 1 : t.shape[1];
  m.values = read(t);
  return m;
}

std::int64_t slot_count(const Problem& problem) {
  return problem.form == RoutingForm::kIds     ? problem.tokens * problem.top_k
         : problem.form == RoutingForm::kPairs ? problem.capacity
                                               : problem.tokens;
}

std::vector<Row> routed_rows(const Problem& problem, const Routing& routing) {
  std::vector<Row> rows = problem.form == RoutingForm::kIds     ? rows_of_ids(problem, routing)
                          : problem.form == RoutingForm::kPairs ? rows_of_pairs(problem, routing)
                                                                : rows_of_groups(problem, routing);
  std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) {
    return std::tie(a.expert, a.token, a.slot) < std::tie(b.expert, b.token, b.slot);
  });
  return rows;
}

Layer read_layer(const Problem& problem, const Tensor& x, const Routing& routing,
                 const Weights& weights, const Lora& lora) {
  Layer layer;
  layer.problem = problem;
  layer.rows = routed_rows(problem, routing);
  layer.slots = slot_count(problem);
  for (Row& row : layer.rows) {
    const Tensor& w = routing.weights;
    if (w.data != nullptr) row.weight = load(w.data, w.dtype, element_offset(w, row.slot));
  }
  layer.x = read_matrix(x);
  if (is_gated(problem.activation.kind)) layer.gate = read_experts(weights.gate);
  layer.up = read_experts(weights.up);
  layer.down = read_experts(weights.down);
  layer.b_gate = read_matrix(weights.b_gate);
  layer.b_up = read_matrix(weights.b_up);
  layer.b_down = read_matrix(weights.b_down);
  layer.lora_up = read_factors(lora.up);
  layer.lora_down = read_factors(lora.down);
  return layer;
}

Layer read_weights(const Problem& problem, const Weights& weights) {
  Problem empty = problem;
  empty.form = RoutingForm::kPairs;
  empty.capacity = 0;
  return read_layer(empty, {}, {}, weights);
}

Forward forward(const Layer& layer, Precision precision) {
  return with_run(layer, precision, [](const auto& run) { return run.forward(); });
}

Backward backward(const Layer& layer, const HiddenRows& h, const Matrix<double>& dout,
                  Precision precision) {
  return with_run(layer, precision, [&](const auto& run) { return run.backward(h, dout); });
}

}  // namespace sonicmoe::oracle
