#include "verify/expected.h"

#include <algorithm>
#include <cmath>

#include "verify/convert.h"
#include "verify/oracle.h"

namespace sonicmoe::verify {
namespace {

using oracle::Backward;
using oracle::Forward;
using oracle::Matrix;
using oracle::Precision;

struct Both {
  Forward forward;
  Backward backward;
};

Both run(const oracle::Layer& layer, const Matrix<double>& dout, Precision precision) {
  Both both;
  both.forward = oracle::forward(layer, precision);
  both.backward = oracle::backward(layer, both.forward.h, dout, precision);
  return both;
}

Matrix<double> stacked(const std::vector<Matrix<double>>& experts) {
  Matrix<double> all;
  for (const Matrix<double>& m : experts) {
    all.rows += m.rows;
    all.cols = m.cols;
    all.values.insert(all.values.end(), m.values.begin(), m.values.end());
  }
  return all;
}

Matrix<double> shaped(const Tensor& view, std::vector<double> values) {
  Matrix<double> m;
  m.cols = view.rank == 1 ? 1 : view.shape[1];
  m.rows = view.shape[0];
  m.values = std::move(values);
  return m;
}

// Accumulated gradients: the initial values plus dW, in one fp32 addition.
void add_initial(Expected& e) {
  const std::vector<double> initial = oracle::read(e.tensor.on_host());
  for (std::size_t i = 0; i < initial.size(); ++i) {
    e.exact.values[i] += initial[i];
    e.same.values[i] += initial[i];
  }
}

void round_to_storage(Expected& e) { oracle::round_all(e.tensor.view.dtype, e.same.values); }

Verdict soundness(const Case& c, const Both& exact, const Both& rounded, const Both& same) {
  const auto check = [&](const char* what, const std::vector<double>& a,
                         const std::vector<double>& b) -> Verdict {
    const bool finite = std::all_of(b.begin(), b.end(), [](double v) { return std::isfinite(v); });
    if (a == b && finite) return {};
    return {Fault::kBadCase, std::string("the case's integers are too large for ") + what};
  };
  std::vector<Verdict> verdicts = {
      check("out", rounded.forward.out.values, same.forward.out.values),
      check("dx", rounded.backward.dx.values, same.backward.dx.values),
      check("dweights", rounded.backward.dweights, same.backward.dweights),
      check("dgate", stacked(rounded.backward.dgate).values, stacked(same.backward.dgate).values),
      check("dup", stacked(rounded.backward.dup).values, stacked(same.backward.dup).values),
      check("ddown", stacked(rounded.backward.ddown).values, stacked(same.backward.ddown).values)};
  if (c.data == Data::kIntegers) {
    verdicts.push_back(check("H", exact.forward.h.up.values, same.forward.h.up.values));
    verdicts.push_back(check("out, exactly", exact.forward.out.values, same.forward.out.values));
    verdicts.push_back(check("dweights, exactly", exact.backward.dweights, same.backward.dweights));
  }
  for (const Verdict& v : verdicts) {
    if (v.fault != Fault::kNone) return v;
  }
  return {};
}

}  // namespace

ExpectedLayer expect_layer(const Case& c, const Tensors& t) {
  oracle::Layer layer = oracle::read_layer(c.problem, t.x.on_host(), t.routing.on_host(),
                                           t.weights.on_host(), t.factors.on_host());
  const Matrix<double> dout = oracle::read_matrix(t.dout.on_host());
  const Both exact = run(layer, dout, Precision::kExact);
  const Both same = run(layer, dout, Precision::kSame);

  ExpectedLayer expected;
  if (c.data != Data::kRandom) {
    expected.sound = soundness(c, exact, run(layer, dout, Precision::kRounded), same);
  }
  const Problem& p = c.problem;
  expected.forward.push_back({"out", t.out, exact.forward.out, same.forward.out, p.tokens});
  std::vector<Expected>& outputs = expected.backward;
  outputs.push_back({"dx", t.dx, exact.backward.dx, same.backward.dx, p.tokens});
  if (t.dweights.block != nullptr) {
    const Tensor& view = t.dweights.view;
    outputs.push_back({"dweights", t.dweights, shaped(view, exact.backward.dweights),
                       shaped(view, same.backward.dweights), view.shape[0]});
  }
  const auto add_weight = [&](const char* what, const BlockView& tensor,
                              const std::vector<Matrix<double>>& a,
                              const std::vector<Matrix<double>>& b) {
    if (tensor.block == nullptr) return;
    outputs.push_back({what, tensor, stacked(a), stacked(b), tensor.view.shape[1]});
    if (c.grad_mode == GradMode::kAccumulate) add_initial(outputs.back());
    round_to_storage(outputs.back());
  };
  if (c.grad_mode == GradMode::kAccumulate) fill_initial_grads(c, t);
  add_weight("dgate", t.grads.gate, exact.backward.dgate, same.backward.dgate);
  add_weight("dup", t.grads.up, exact.backward.dup, same.backward.dup);
  add_weight("ddown", t.grads.down, exact.backward.ddown, same.backward.ddown);
  const oracle::Factors &up = exact.backward.dlora_up, &same_up = same.backward.dlora_up;
  const oracle::Factors &down = exact.backward.dlora_down, &same_down = same.backward.dlora_down;
  add_weight("dup.a", t.factor_grads.up_a, up.a, same_up.a);
  add_weight("dup.b", t.factor_grads.up_b, up.b, same_up.b);
  add_weight("dup.gate_b", t.factor_grads.up_gate_b, up.gate_b, same_up.gate_b);
  add_weight("ddown.a", t.factor_grads.down_a, down.a, same_down.a);
  add_weight("ddown.b", t.factor_grads.down_b, down.b, same_down.b);
  const auto add_bias = [&](const char* what, const BlockView& tensor, const Matrix<double>& a,
                            const Matrix<double>& b) {
    if (tensor.block == nullptr) return;
    outputs.push_back({what, tensor, a, b, 1});
    if (c.grad_mode == GradMode::kAccumulate) add_initial(outputs.back());
    round_to_storage(outputs.back());
  };
  add_bias("db_gate", t.grads.b_gate, exact.backward.db_gate, same.backward.db_gate);
  add_bias("db_up", t.grads.b_up, exact.backward.db_up, same.backward.db_up);
  add_bias("db_down", t.grads.b_down, exact.backward.db_down, same.backward.db_down);
  std::erase_if(outputs, [&](const Expected& e) { return !wants(c, e.what); });
  return expected;
}

}  // namespace sonicmoe::verify
