// The oracle with the public signatures. As with a backend, forward writes H to the caller's buffer
// and backward reads it from there.
#include <cmath>

#include "verify/convert.h"
#include "verify/implementation.h"
#include "verify/oracle.h"
#include "verify/oracle_gemm.h"

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

// Writes or accumulates gradients by expert. kWrite writes zeros for experts without rows,
// kAccumulate skips them.
class GradWriter {
 public:
  GradWriter(const oracle::Layer& layer, GradMode mode)
      : adds_(mode == GradMode::kAccumulate),
        has_rows_(static_cast<std::size_t>(layer.problem.experts), 0) {
    for (const oracle::Row& row : layer.rows) has_rows_[row.expert] = 1;
  }

  void put(const Tensor& grad, const std::vector<Matrix<double>>& experts) const {
    for (std::size_t e = 0; grad.data != nullptr && e < experts.size(); ++e) {
      put_expert(grad, static_cast<std::int64_t>(e), experts[e].values.data());
    }
  }
  void put(const Tensor& grad, const Matrix<double>& experts) const {
    for (std::int64_t e = 0; grad.data != nullptr && e < experts.rows; ++e) {
      put_expert(grad, e, experts.row(e));
    }
  }

 private:
  void put_expert(const Tensor& grad, std::int64_t e, const double* values) const {
    if (adds_ && has_rows_[e] == 0) return;
    const std::int64_t count = oracle::element_count(grad) / grad.shape[0];
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t offset = oracle::element_offset(grad, e * count + i);
      const double before = adds_ ? oracle::load(grad.data, grad.dtype, offset) : 0.0;
      oracle::store(grad.data, grad.dtype, offset, before + values[i]);
    }
  }

  bool adds_;
  std::vector<char> has_rows_;
};

void backward(Precision precision, const Problem& problem, const BackwardArgs& args) {
  const oracle::Layer layer = oracle::read_layer(problem, args.x, args.routing, args.weights);
  const auto rows = static_cast<std::int64_t>(layer.rows.size());
  oracle::HiddenRows h;
  h.up = oracle::read_matrix(hidden_view(problem, args.h, rows, 0));
  if (!layer.gate.empty()) h.gate = oracle::read_matrix(hidden_view(problem, args.h, rows, 1));
  const oracle::Backward result =
      oracle::backward(layer, h, oracle::read_matrix(args.dout), precision);
  put(args.dx, result.dx.values);
  put(args.dweights, result.dweights);
  const GradWriter writer(layer, args.grad_mode);
  writer.put(args.grads.gate, result.dgate);
  writer.put(args.grads.up, result.dup);
  writer.put(args.grads.down, result.ddown);
  writer.put(args.grads.b_gate, result.db_gate);
  writer.put(args.grads.b_up, result.db_up);
  writer.put(args.grads.b_down, result.db_down);
}

Sizes sizes(const Problem& p, Pass pass) {
  Sizes s;
  if (pass != Pass::kInference) {
    s.h_bytes =
        gate_factor(p.activation.kind) * oracle::slot_count(p) * p.width * dtype_bytes(p.dtype);
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
  i.grouped_gemm = [precision](const GroupedGemm& args) {
    Tensor written = args.d;
    const Matrix<double> d = oracle::grouped_gemm(args, precision);
    written.shape[0] = d.rows;
    oracle::write(written, d.values);
  };
  i.grouped_gemm_k = [precision](const GroupedGemmK& args) {
    oracle::write(args.d, oracle::grouped_gemm_k(args, precision).values);
  };
  return i;
}

}  // namespace sonicmoe::verify
