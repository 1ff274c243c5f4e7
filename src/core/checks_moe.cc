// The checks of the layer.
#include <string>

#include "core/check_tensor.h"
#include "core/checks.h"

namespace sonicmoe::checks {
namespace {

constexpr std::int32_t kFormCount = 3;
constexpr std::int32_t kPassCount = 3;
constexpr std::int32_t kGradModeCount = 2;
constexpr std::int32_t kDTypeCount = 6;

DType score_dtype(const Problem& p) { return p.dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

// Refuses a parameter other than 0 for an activation kind without that parameter. A kind lacks a
// parameter if the parameter's default in ActivationTraits is 0.
void activation_parameter(const char* name, const Activation& a, double value,
                          double ActivationTraits::* of_kind) {
  if (value == 0.0 || activation_traits(a.kind).*of_kind != 0.0) return;
  std::string owners;
  for (std::int32_t i = 0; i < kActivationCount; ++i) {
    const ActivationTraits traits = activation_traits(static_cast<ActivationKind>(i));
    if (traits.*of_kind != 0.0) owners += (owners.empty() ? "" : " or ") + std::string(traits.name);
  }
  refuse(std::string("activation ") + name + " is " + number_text(value) + " for " +
         activation_name(a.kind) + ", must be 0: only " + owners + " has it");
}

// A cap of situ. Beyond these bounds fp32 would overflow in cap * tanh(x / cap).
void cap(const char* name, double value) {
  if (value == 0.0 || (value >= 1e-9 && value <= 1e9)) return;
  refuse(std::string(name) + " is " + number_text(value) +
         " for situ, must be 1e-9 to 1e9, or 0 for the default");
}

void activation(const Activation& a) {
  known("activation", static_cast<std::int32_t>(a.kind), kActivationCount);
  finite("activation alpha", a.alpha);
  finite("activation limit", a.limit);
  activation_parameter("alpha", a, a.alpha, &ActivationTraits::alpha);
  activation_parameter("limit", a, a.limit, &ActivationTraits::limit);
  if (a.limit < 0.0) {
    refuse("activation limit is " + number_text(a.limit) +
           ", must be above 0, or 0 for the default");
  }
  if (a.kind == ActivationKind::kSiTU) {
    cap("activation alpha", a.alpha);
    cap("activation limit", a.limit);
  }
}

void capacity_of_form(const Problem& p) {
  switch (p.form) {
    case RoutingForm::kIds:
      at_least("top_k", p.top_k, 1);
      break;
    case RoutingForm::kPairs:
      at_least("capacity", p.capacity, 0);
      break;
    case RoutingForm::kGrouped:
      break;
  }
  if (p.form != RoutingForm::kIds && p.top_k != 0) {
    refuse("top_k is " + std::to_string(p.top_k) + ", must be 0: only the ids form has it");
  }
  if (p.form != RoutingForm::kPairs && p.capacity != 0) {
    refuse("capacity is " + std::to_string(p.capacity) + ", must be 0: only the pairs form has it");
  }
}

struct Letters {
  Dim T, d, n, E, K, C;
};
Letters letters_of(const Problem& p) {
  return {{"T", p.tokens},  {"d", p.hidden}, {"n", p.width},
          {"E", p.experts}, {"K", p.top_k},  {"C", rows(p)}};
}

// Refuses routing tensors that belong to another form.
void routing_of_other_forms(RoutingForm form, const Routing& r) {
  struct Entry {
    const Tensor& tensor;
    const char* name;
    RoutingForm owner;
    const char* reason;
  };
  const Entry entries[] = {
      {r.ids, "routing.ids", RoutingForm::kIds, "it belongs to the ids form"},
      {r.token, "routing.token", RoutingForm::kPairs, "it belongs to the pairs form"},
      {r.expert, "routing.expert", RoutingForm::kPairs, "it belongs to the pairs form"},
      {r.row_begin, "routing.row_begin", RoutingForm::kGrouped, "it belongs to the grouped form"},
      {r.row_count, "routing.row_count", RoutingForm::kGrouped, "it belongs to the grouped form"},
  };
  for (const Entry& e : entries) {
    if (e.owner != form) absent(e.tensor, e.name, e.reason);
  }
}

Shape weights_shape(const Problem& p) {
  const Letters s = letters_of(p);
  if (p.form == RoutingForm::kIds) return {s.T, s.K};
  if (p.form == RoutingForm::kPairs) return {s.C};
  return {s.T};
}

void routing(const Problem& p, const Routing& r) {
  const Letters s = letters_of(p);
  routing_of_other_forms(p.form, r);
  if (p.form == RoutingForm::kIds) {
    input(r.ids, "routing.ids", {s.T, s.K}, kIndices);
  } else if (p.form == RoutingForm::kPairs) {
    input(r.token, "routing.token", {s.C}, kIndices);
    input(r.expert, "routing.expert", {s.C}, kIndices);
  } else {
    input(r.row_begin, "routing.row_begin", {s.E}, kIndices);
    input(r.row_count, "routing.row_count", {s.E}, kIndices);
  }
  if (p.form != RoutingForm::kGrouped || given(r.weights)) {
    input(r.weights, "routing.weights", weights_shape(p), score_dtype(p));
  }
}

// One member of Weights and the shape it must have. Rules have the order of the struct.
struct WeightRule {
  Tensor Weights::* member;
  const char* name;
  const char* grad_name;
  Shape shape;
};
struct WeightRules {
  WeightRule rule[6];
};
WeightRules weight_rules(const Problem& p) {
  const Letters s = letters_of(p);
  return {{{&Weights::gate, "weights.gate", "grads.gate", {s.E, s.n, s.d}},
           {&Weights::up, "weights.up", "grads.up", {s.E, s.n, s.d}},
           {&Weights::down, "weights.down", "grads.down", {s.E, s.d, s.n}},
           {&Weights::b_gate, "weights.b_gate", "grads.b_gate", {s.E, s.n}},
           {&Weights::b_up, "weights.b_up", "grads.b_up", {s.E, s.n}},
           {&Weights::b_down, "weights.b_down", "grads.b_down", {s.E, s.d}}}};
}

bool is_bias(Tensor Weights::* member) {
  return member == &Weights::b_gate || member == &Weights::b_up || member == &Weights::b_down;
}

void weights(const Problem& p, const Weights& w) {
  const bool gated = is_gated(p.activation.kind);
  if (!gated) {
    const std::string reason = std::string(activation_name(p.activation.kind)) + " has no gate";
    absent(w.gate, "weights.gate", reason.c_str());
    absent(w.b_gate, "weights.b_gate", reason.c_str());
  } else if (given(w.b_gate) != given(w.b_up)) {
    const bool gate = given(w.b_gate);
    refuse(std::string(gate ? "weights.b_gate" : "weights.b_up") + " is given without " +
           (gate ? "weights.b_up" : "weights.b_gate") + ", must be given together for " +
           activation_name(p.activation.kind));
  }
  for (const WeightRule& r : weight_rules(p).rule) {
    const Tensor& t = w.*r.member;
    if (!gated && r.member == &Weights::gate) continue;
    if (is_bias(r.member) && !given(t)) continue;
    (is_bias(r.member) ? input : parameter)(t, r.name, r.shape, p.dtype);
  }
}

// fp64 layers have fp64 gradients only: they serve gradient checks, for which fp32 is too coarse.
DTypes grad_dtypes(const Problem& p, GradMode mode) {
  if (p.dtype == DType::kF64) return DType::kF64;
  if (mode == GradMode::kAccumulate) return DType::kF32;
  return {p.dtype, DType::kF32};
}

void grads(const Problem& p, const BackwardArgs& args) {
  known("grad_mode", static_cast<std::int32_t>(args.grad_mode), kGradModeCount);
  for (const WeightRule& r : weight_rules(p).rule) {
    const Tensor& grad = args.grads.*r.member;
    if (!given(grad)) continue;
    if (!given(args.weights.*r.member)) {
      refuse(std::string(r.grad_name) + " is given, must be empty: " + r.name + " is not given");
    }
    output(grad, r.grad_name, r.shape, grad_dtypes(p, args.grad_mode));
  }
  factor_grads(p, args, grad_dtypes(p, args.grad_mode));
  if (given(args.dx)) {
    output(args.dx, "dx", {{"T", p.tokens}, {"d", p.hidden}}, p.dtype);
  }
  if (given(args.dweights)) {
    if (p.form == RoutingForm::kGrouped && !given(args.routing.weights)) {
      refuse("dweights is given, must be empty: routing.weights is not given");
    }
    output(args.dweights, "dweights", weights_shape(p), score_dtype(p));
  }
}

}  // namespace

std::int64_t rows(const Problem& p) {
  if (p.form == RoutingForm::kIds) return product("tokens * top_k", {p.tokens, p.top_k});
  return p.form == RoutingForm::kPairs ? p.capacity : p.tokens;
}

void problem(const Problem& p) {
  known("form", static_cast<std::int32_t>(p.form), kFormCount);
  known("dtype", static_cast<std::int32_t>(p.dtype), kDTypeCount);
  if (!kFloats.contains(p.dtype)) {
    refuse(std::string("dtype is ") + dtype_name(p.dtype) + ", must be " + kFloats.text());
  }
  activation(p.activation);
  at_least("tokens", p.tokens, 0);
  at_least("hidden", p.hidden, 1);
  at_least("width", p.width, 1);
  at_least("experts", p.experts, 1);
  below_2_31("tokens", p.tokens);
  below_2_31("experts", p.experts);
  capacity_of_form(p);
  below_2_31("top_k", p.top_k);
  precision(p);
  low_rank(p);
  const std::int64_t capacity = rows(p);
  below_2_31("row capacity C", capacity);
  const std::int64_t bytes = dtype_bytes(p.dtype);
  const std::int64_t gate = gate_factor(p.activation.kind);
  array_bytes("tokens * hidden in bytes", {p.tokens, p.hidden, bytes});
  array_bytes("C * hidden in bytes", {capacity, p.hidden, bytes});
  array_bytes("C * width in bytes", {gate * bytes, capacity, p.width});
  array_bytes("experts * width * hidden in bytes", {gate * bytes, p.experts, p.width, p.hidden});
}

void moe_sizes(const Problem& p, Pass pass, const Exec& e) {
  exec(e);
  problem(p);
  known("pass", static_cast<std::int32_t>(pass), kPassCount);
}

void moe_forward(const Problem& p, const ForwardArgs& args, const Exec& e) {
  exec(e);
  problem(p);
  input(args.x, "x", {{"T", p.tokens}, {"d", p.hidden}}, p.dtype);
  routing(p, args.routing);
  weights(p, args.weights);
  factors(p, args.lora);
  output(args.out, "out", {{"T", p.tokens}, {"d", p.hidden}}, p.dtype);
}

void moe_backward(const Problem& p, const BackwardArgs& args, const Exec& e) {
  exec(e);
  problem(p);
  input(args.x, "x", {{"T", p.tokens}, {"d", p.hidden}}, p.dtype);
  routing(p, args.routing);
  weights(p, args.weights);
  factors(p, args.lora);
  input(args.dout, "dout", {{"T", p.tokens}, {"d", p.hidden}}, p.dtype);
  grads(p, args);
}

void quantize_weights(const Problem& p, const Weights& w, const Exec& e) {
  exec(e);
  problem(p);
  if (p.precision != Precision::kFp8) {
    refuse("precision is tensors, must be fp8: only fp8 has quantised weights");
  }
  weights(p, w);
}

void h_views(const Problem& p, const Weights& w, const Exec& e) {
  exec(e);
  problem(p);
  if (p.precision == Precision::kFp8 && p.kept_h == KeptH::kPrecision) {
    refuse(Status::kUnsupported, "H is kept in fp8, must be kept in bf16 to have views");
  }
  for (const WeightRule& r : weight_rules(p).rule) {
    const bool looked_at =
        r.member == &Weights::up || (r.member == &Weights::gate && is_gated(p.activation.kind));
    if (looked_at) input(w.*r.member, r.name, r.shape, p.dtype);
  }
}

Pass forward_pass(const ForwardArgs& args) {
  const bool training = args.h.data != nullptr || args.saved.data != nullptr;
  return training ? Pass::kForward : Pass::kInference;
}

void forward_buffers(const ForwardArgs& args, const Sizes& needed, const Exec& exec) {
  buffer(args.h, "h", needed.h_bytes, exec);
  buffer(args.saved, "saved", needed.saved_bytes, exec);
  buffer(args.scratch, "scratch", needed.scratch_bytes, exec);
}

void backward_buffers(const BackwardArgs& args, const Sizes& needed, const Exec& exec) {
  buffer(args.h, "h", needed.h_bytes, exec);
  buffer(args.saved, "saved", needed.saved_bytes, exec);
  buffer(args.scratch, "scratch", needed.scratch_bytes, exec);
}

}  // namespace sonicmoe::checks
