// The oracle with the public signatures. As with a backend, forward writes H to the caller's buffer
// and backward reads it from there.
#include <cmath>

#include "core/fp8_layout.h"
#include "verify/convert.h"
#include "verify/implementation.h"
#include "verify/oracle.h"
#include "verify/oracle_fp8.h"
#include "verify/oracle_gemm.h"
#include "verify/oracle_packed.h"

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

// In fp8 the layer gets the dequantised weights of the buffer. The oracle quantises them again,
// which gives the same values.
template <class Args>
oracle::Layer layer_of(const Problem& problem, const Args& args) {
  oracle::Layer layer = oracle::read_layer(problem, args.x, args.routing, args.weights, args.lora);
  if (args.fp8_weights.data != nullptr) oracle::read_fp8_weights(args.fp8_weights.data, layer);
  return layer;
}

void forward(Precision precision, const Problem& problem, const ForwardArgs& args) {
  const oracle::Layer layer = layer_of(problem, args);
  const oracle::Forward result = oracle::forward(layer, precision);
  oracle::write(args.out, result.out.values);
  if (args.h.data == nullptr) return;
  if (fp8::keeps_codes(problem)) {
    oracle::write_kept_h(problem, result.h, layer.slots, args.h.data);
    return;
  }
  const auto rows = static_cast<std::int64_t>(layer.rows.size());
  oracle::write(hidden_view(problem, args.h, rows, 0), result.h.up.values);
  if (!result.h.gate.empty()) {
    oracle::write(hidden_view(problem, args.h, rows, 1), result.h.gate.values);
  }
}

oracle::HiddenRows hidden(const oracle::Layer& layer, const Buffer& buffer) {
  const auto rows = static_cast<std::int64_t>(layer.rows.size());
  if (fp8::keeps_codes(layer.problem)) {
    return oracle::read_kept_h(layer.problem, rows, layer.slots, buffer.data);
  }
  oracle::HiddenRows h;
  h.up = oracle::read_matrix(hidden_view(layer.problem, buffer, rows, 0));
  if (!layer.gate.empty()) {
    h.gate = oracle::read_matrix(hidden_view(layer.problem, buffer, rows, 1));
  }
  return h;
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
    const Tensor part = oracle::slice(grad, e);
    std::vector<double> sum(static_cast<std::size_t>(oracle::element_count(part)));
    if (adds_) sum = oracle::read(part);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
    oracle::write(part, sum);
  }

  bool adds_;
  std::vector<char> has_rows_;
};

void backward(Precision precision, const Problem& problem, const BackwardArgs& args) {
  const oracle::Layer layer = layer_of(problem, args);
  const oracle::HiddenRows h = hidden(layer, args.h);
  const oracle::Backward result =
      oracle::backward(layer, h, oracle::read_matrix(args.dout), precision);
  put(args.dx, result.dx.values);
  put(args.dweights, result.dweights);
  const GradWriter writer(layer, args.grad_mode);
  writer.put(args.grads.gate, result.dgate);
  writer.put(args.grads.up, result.dup);
  writer.put(args.grads.down, result.ddown);
  const Lora& factors = args.lora_grads;
  writer.put(factors.up.a, result.dlora_up.a);
  writer.put(factors.up.b, result.dlora_up.b);
  writer.put(factors.up.gate_b, result.dlora_up.gate_b);
  writer.put(factors.down.a, result.dlora_down.a);
  writer.put(factors.down.b, result.dlora_down.b);
  writer.put(args.grads.b_gate, result.db_gate);
  writer.put(args.grads.b_up, result.db_up);
  writer.put(args.grads.b_down, result.db_down);
}

Sizes sizes(const Problem& p, Pass pass) {
  Sizes s;
  if (pass != Pass::kInference) {
    s.h_bytes = kept_h_bytes(p);
  }
  return s;
}

}  // namespace

std::int64_t kept_h_bytes(const Problem& p) {
  const std::int64_t capacity = oracle::slot_count(p);
  if (fp8::keeps_codes(p)) return fp8::kept_h_layout(p, capacity).bytes;
  return gate_factor(p.activation.kind) * capacity * p.width * dtype_bytes(p.dtype);
}

Implementation oracle_implementation(Precision precision) {
  Implementation i;
  i.name = "oracle";
  i.memory = host_memory();
  i.moe_sizes = sizes;
  i.quantize_weights = [](const Problem& p, const Weights& weights, const Buffer& out) {
    oracle::write_fp8_weights(oracle::read_weights(p, weights), out.data);
  };
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
  i.unpack_weights = [](const PackedWeights& packed, const Tensor& out) {
    oracle::write(out, oracle::unpack_weights(packed, out.dtype));
  };
  return i;
}

}  // namespace sonicmoe::verify
