// The oracle behind the public signatures. H lies in the caller's buffer as a backend keeps it, so
// that backward depends on what forward left there.
#include <cmath>

#include "verify/convert.h"
#include "verify/implementation.h"
#include "verify/oracle.h"

namespace sonicmoe::verify {
namespace {

using oracle::Matrix;
using oracle::Precision;

Tensor hidden_view(const Problem& p, Buffer h, std::int64_t rows, std::int64_t part) {
  auto* base = static_cast<std::uint8_t*>(h.data);
  return tensor2(base + part * rows * p.width * dtype_bytes(p.dtype), p.dtype, rows, p.width);
}

void put(const Tensor& t, const std::vector<double>& values) {
  if (t.data != nullptr) oracle::write(t, values);
}

void forward(Precision precision, const Problem& problem, const ForwardArgs& args) {
  const oracle::Layer layer = oracle::read_layer(problem, args.x, args.routing, args.weights);
  const oracle::Forward result = oracle::forward(layer, precision);
  oracle::write(args.out, result.out.values);
  if (args.h.data == nullptr) return;
  const auto rows = static_cast<std::int64_t>(layer.rows.size());
  oracle::write(hidden_view(problem, args.h, rows, 0), result.h.up.values);
  if (!result.h.gate.empty()) {
    oracle::write(hidden_view(problem, args.h, rows, 1), result.h.gate.values);
  }
}

void put_weight(const Tensor& grad, const std::vector<Matrix<double>>& experts,
                const std::vector<char>& has_rows, GradMode mode) {
  if (grad.data == nullptr) return;
  const std::int64_t count = grad.shape[1] * grad.shape[2];
  for (std::int64_t e = 0; e < grad.shape[0]; ++e) {
    if (mode == GradMode::kAccumulate && has_rows[e] == 0) continue;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t offset = oracle::element_offset(grad, e * count + i);
      const double before =
          mode == GradMode::kAccumulate ? oracle::load(grad.data, grad.dtype, offset) : 0.0;
      oracle::store(grad.data, grad.dtype, offset, before + experts[e].values[i]);
    }
  }
}

void backward(Precision precision, const Problem& problem, const BackwardArgs& args) {
  const oracle::Layer layer = oracle::read_layer(problem, args.x, args.routing, args.weights);
  const auto rows = static_cast<std::int64_t>(layer.rows.size());
  oracle::HiddenRows h;
  h.up = oracle::read_matrix(hidden_view(problem, args.h, rows, 0));
  if (!layer.gate.empty()) h.gate = oracle::read_matrix(hidden_view(problem, args.h, rows, 1));
  const oracle::Backward result =
      oracle::backward(layer, h, oracle::read_matrix(args.dout), precision);
  std::vector<char> has_rows(static_cast<std::size_t>(problem.experts), 0);
  for (const oracle::Row& row : layer.rows) has_rows[row.expert] = 1;
  put(args.dx, result.dx.values);
  put(args.dweights, result.dweights);
  put_weight(args.grads.gate, result.dgate, has_rows, args.grad_mode);
  put_weight(args.grads.up, result.dup, has_rows, args.grad_mode);
  put_weight(args.grads.down, result.ddown, has_rows, args.grad_mode);
  put(args.grads.b_gate, result.db_gate.values);
  put(args.grads.b_up, result.db_up.values);
  put(args.grads.b_down, result.db_down.values);
}

Sizes sizes(const Problem& p, Pass pass) {
  const std::int64_t capacity = p.form == RoutingForm::kIds     ? p.tokens * p.top_k
                                : p.form == RoutingForm::kPairs ? p.capacity
                                                                : p.tokens;
  Sizes s;
  if (pass != Pass::kInference) {
    s.h_bytes = gate_factor(p.activation.kind) * capacity * p.width * dtype_bytes(p.dtype);
  }
  return s;
}

}  // namespace

Implementation oracle_implementation(Precision precision) {
  Implementation i;
  i.name = "oracle";
  i.memory = host_memory();
  i.moe_sizes = sizes;
  i.moe_forward = [precision](const Problem& p, const ForwardArgs& args) {
    forward(precision, p, args);
  };
  i.moe_backward = [precision](const Problem& p, const BackwardArgs& args) {
    backward(precision, p, args);
  };
  return i;
}

}  // namespace sonicmoe::verify
