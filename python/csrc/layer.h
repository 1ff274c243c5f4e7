// The layer as operators: inference, forward, backward, backward into main gradients.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "arguments.h"
#include "device_scope.h"
#include "sonicmoe/moe.h"
#include "views.h"

namespace sonicmoe_torch {

// The arguments that every operator of the layer takes. _call.py has the same list.
#define SONICMOE_LAYER(ARGUMENT)                                                \
  ARGUMENT(Array, x)                                                            \
  ARGUMENT(Array, index)       /* ids (T, K), or token (C), or row_begin (E) */ \
  ARGUMENT(MaybeArray, second) /* none, or expert (C), or row_count (E) */      \
  ARGUMENT(MaybeArray, weights)                                                 \
  ARGUMENT(MaybeArray, w_gate) /* given: w_up is the up projection alone */     \
  ARGUMENT(Array, w_up)                                                         \
  ARGUMENT(Array, w_down)                                                       \
  ARGUMENT(MaybeArray, b_up)                                                    \
  ARGUMENT(MaybeArray, b_down)                                                  \
  ARGUMENT(std::int64_t, form)       /* RoutingForm */                          \
  ARGUMENT(std::int64_t, activation) /* ActivationKind */                       \
  ARGUMENT(double, alpha)                                                       \
  ARGUMENT(double, limit)                                                       \
  ARGUMENT(std::int64_t, gate_layout) /* GateLayout */                          \
  ARGUMENT(std::int64_t, precision)   /* CallPrecision */
struct Layer {
  SONICMOE_ARGUMENTS(SONICMOE_LAYER)
};

/// Problem::precision and Problem::kept_h as one number, equal to PRECISION in _names.py.
enum class CallPrecision : std::int32_t { kTensors = 0, kFp8 = 1, kFp8KeepsTensors = 2 };

/// The last argument of moe_inference, moe_forward and their backward operators. Without it, an fp8
/// call quantises the weights, and its backward quantises them again.
struct Fp8Argument {
  MaybeArray fp8_weights;
  auto fields() { return std::tie(fp8_weights); }
  static std::string schema() { return "Tensor? fp8_weights=None"; }
};

/// The positions of the arguments of SONICMOE_LAYER: bit i of `needs` asks for the gradient of
/// argument i.
#define SONICMOE_POSITION(type, name) name,
enum class At : std::int32_t { SONICMOE_LAYER(SONICMOE_POSITION) };

inline sonicmoe::ActivationKind activation_of(std::int64_t number) {
  return enumerator("activation", number,
                    static_cast<sonicmoe::ActivationKind>(sonicmoe::kActivationCount - 1));
}

inline GateLayout gate_layout_of(std::int64_t number) {
  return enumerator("gate_layout", number, GateLayout::kInterleaved);
}

/// The arguments of a call as structs of the library.
struct Call {
  sonicmoe::Problem problem;
  sonicmoe::Routing routing;
  sonicmoe::Weights weights;
  sonicmoe::Tensor x;
};

inline void set_precision(sonicmoe::Problem& problem, std::int64_t number) {
  const auto precision = enumerator("precision", number, CallPrecision::kFp8KeepsTensors);
  if (precision == CallPrecision::kTensors) return;
  problem.precision = sonicmoe::Precision::kFp8;
  if (precision == CallPrecision::kFp8KeepsTensors) problem.kept_h = sonicmoe::KeptH::kTensors;
}

inline sonicmoe::Weights weights_of(const Layer& a, const MaybeArray& w_gate,
                                    const MaybeArray& w_up, const MaybeArray& w_down,
                                    const MaybeArray& b_up, const MaybeArray& b_down) {
  const bool gated = sonicmoe::is_gated(activation_of(a.activation));
  const GateLayout layout = gate_layout_of(a.gate_layout);
  sonicmoe::Weights w;
  const Halves first = gate_and_up(w_gate, w_up, gated && !a.w_gate.has_value(), layout);
  w.gate = first.gate;
  w.up = first.up;
  if (b_up.has_value() && gated) {
    const Halves halves = split(*b_up, layout, "b_up");
    w.b_gate = halves.gate;
    w.b_up = halves.up;
  } else {
    w.b_up = view(b_up, "b_up");
  }
  w.down = view(w_down, "w_down");
  w.b_down = view(b_down, "b_down");
  return w;
}

inline Call call_of(Layer& a) {
  expect_rank(a.x, 2, "x");
  a.x = readable_rows(a.x, "x");
  expect_rank(a.w_up, 3, "w_up");
  expect_rank(a.w_down, 3, "w_down");
  if (a.w_gate.has_value()) expect_rank(*a.w_gate, 3, "w_up");
  if (a.b_up.has_value()) expect_rank(*a.b_up, 2, "b_up");
  if (a.w_gate.has_value()) expect_own_memory(*a.w_gate, "w_up");
  expect_own_memory(a.w_up, "w_up");
  expect_own_memory(a.w_down, "w_down");
  Call c;
  c.problem.form = enumerator("form", a.form, sonicmoe::RoutingForm::kGrouped);
  c.problem.tokens = a.x.size(0);
  c.problem.hidden = a.x.size(1);
  c.problem.experts = a.w_down.size(0);
  c.problem.width = a.w_down.size(2);
  c.problem.dtype = dtype_of(a.x, "x");
  c.problem.activation = {activation_of(a.activation), a.alpha, a.limit};
  set_precision(c.problem, a.precision);
  c.routing.weights = view(a.weights, "weights");
  switch (c.problem.form) {
    case sonicmoe::RoutingForm::kIds:
      expect_rank(a.index, 2, "topk_ids");
      c.problem.top_k = a.index.size(1);
      c.routing.ids = view(a.index, "topk_ids");
      break;
    case sonicmoe::RoutingForm::kPairs:
      expect_rank(a.index, 1, "pairs.token");
      c.problem.capacity = a.index.size(0);
      c.routing.token = view(a.index, "pairs.token");
      c.routing.expert = view(a.second, "pairs.expert");
      break;
    case sonicmoe::RoutingForm::kGrouped:
      c.routing.row_begin = view(a.index, "expert_offsets");
      c.routing.row_count = view(a.second, "expert_offsets");
      break;
  }
  c.weights = weights_of(a, a.w_gate, a.w_up, a.w_down, a.b_up, a.b_down);
  c.x = view(a.x, "x");
  return c;
}

/// Bytes that outlive the call (metadata, codes and scales). A backend does not write all of them.
/// On the CPU they are cleared, so that a recomputed forward (activation checkpointing) gives equal
/// bytes. On CUDA they are not cleared, because this would take one more kernel.
inline Array new_bytes(const Array& like, std::int64_t bytes) {
  if (like.is_cuda()) return empty(like, {bytes}, ScalarType::Byte);
  return torch::stable::new_zeros(like, {bytes}, ScalarType::Byte);
}

/// The quantised weights of a call: the argument fp8_weights, or memory that the call fills.
class QuantisedWeights {
 public:
  QuantisedWeights(const Call& c, const MaybeArray& given, const Array& like,
                   const sonicmoe::Exec& exec)
      : memory_(given) {
    if (given.has_value()) memory_ = owned_bytes(*given, "fp8_weights", ScalarType::Byte);
    if (given.has_value() || c.problem.precision == sonicmoe::Precision::kTensors) return;
    memory_ = empty(like, {sonicmoe::fp8_weights_bytes(c.problem, exec)}, ScalarType::Byte);
    sonicmoe::quantize_weights(c.problem, c.weights, buffer(), exec);
  }
  sonicmoe::Buffer buffer() const { return memory_ ? lend(*memory_) : sonicmoe::Buffer{}; }

 private:
  MaybeArray memory_;
};

using InferenceCall = Joined<Layer, Fp8Argument>;

inline Array moe_inference(InferenceCall& a) {
  const DeviceScope device(a.x);
  const Call c = call_of(a);
  const auto sizes = sonicmoe::moe_sizes(c.problem, sonicmoe::Pass::kInference, device.exec());
  Array out = empty(a.x, {a.x.size(0), a.x.size(1)}, a.x.scalar_type());
  const Scratch scratch(a.x, sizes.scratch_bytes);
  const QuantisedWeights fp8(c, a.fp8_weights, a.x, device.exec());
  sonicmoe::moe_forward(
      c.problem,
      {c.x, c.routing, c.weights, view(out, "out"), {}, {}, scratch.buffer(), fp8.buffer()},
      device.exec());
  return out;
}

/// The buffers to which backward adds. Forward ignores them: they are its arguments only so that
/// autograd can pass them to backward.
#define SONICMOE_MAIN_GRADIENTS(ARGUMENT) \
  ARGUMENT(MaybeArray, g_gate)            \
  ARGUMENT(MaybeArray, g_up)              \
  ARGUMENT(MaybeArray, g_down)
struct MainGradients {
  SONICMOE_ARGUMENTS(SONICMOE_MAIN_GRADIENTS)
};
using ForwardCall = Joined<Layer, MainGradients, Fp8Argument>;

/// Bytes of metadata kept for backward: an upper limit for every backend. So fake implementations
/// know the shape without asking a backend, also with symbolic T. _fakes.py has the same formula.
inline std::int64_t saved_capacity(const sonicmoe::Problem& p) {
  return 20 * sonicmoe::row_capacity(p) + 16 * p.tokens + 1024 * p.experts;
}

/// Whether H is kept as codes and scales.
inline bool keeps_codes(const sonicmoe::Problem& p) {
  return p.precision == sonicmoe::Precision::kFp8 && p.kept_h == sonicmoe::KeptH::kPrecision;
}

/// Memory for the kept H: (C, G*n) of the tensors' dtype, or uint8 for codes and scales.
inline Array new_kept_h(const Array& x, const sonicmoe::Problem& p, std::int64_t bytes) {
  if (keeps_codes(p)) return new_bytes(x, bytes);
  const std::int64_t width = sonicmoe::gate_factor(p.activation.kind) * p.width;
  return empty(x, {sonicmoe::row_capacity(p), width}, x.scalar_type());
}

inline std::tuple<Array, Array, Array> moe_forward(ForwardCall& a) {
  const DeviceScope device(a.x);
  const Call c = call_of(a);
  const Array& x = a.x;
  const auto sizes = sonicmoe::moe_sizes(c.problem, sonicmoe::Pass::kForward, device.exec());
  Array out = empty(x, {x.size(0), x.size(1)}, x.scalar_type());
  Array h = new_kept_h(x, c.problem, sizes.h_bytes);
  Array saved = new_bytes(x, saved_capacity(c.problem));
  const Scratch scratch(x, sizes.scratch_bytes);
  const QuantisedWeights fp8(c, a.fp8_weights, x, device.exec());
  sonicmoe::moe_forward(c.problem,
                        {c.x, c.routing, c.weights, view(out, "out"), lend(h), lend(saved),
                         scratch.buffer(), fp8.buffer()},
                        device.exec());
  return {out, h, saved};
}

#define SONICMOE_OUTPUT_GRADIENT(ARGUMENT) ARGUMENT(Array, dout)
struct OutputGradient {
  SONICMOE_ARGUMENTS(SONICMOE_OUTPUT_GRADIENT)
};
#define SONICMOE_KEPT(ARGUMENT) \
  ARGUMENT(Array, h)            \
  ARGUMENT(Array, saved)        \
  ARGUMENT(std::int64_t, needs)
struct Kept {
  SONICMOE_ARGUMENTS(SONICMOE_KEPT)
};
using BackwardCall = Joined<OutputGradient, Layer, Kept>;

inline bool needs(const BackwardCall& a, At argument) {
  return (a.needs >> static_cast<std::int32_t>(argument) & 1) != 0;
}

inline MaybeArray gradient_of(const BackwardCall& a, At argument, const MaybeArray& of) {
  if (!needs(a, argument) || !of.has_value()) return std::nullopt;
  return empty_beside(*of);
}

inline Array or_nothing(const MaybeArray& t, const Array& like) { return t ? *t : nothing(like); }

/// dx, which is contiguous for any strides of x.
inline MaybeArray gradient_of_x(const BackwardCall& a) {
  if (!needs(a, At::x)) return std::nullopt;
  return empty(a.x, {a.x.size(0), a.x.size(1)}, a.x.scalar_type());
}

/// Refuses an H or metadata of another size than the forward of these sizes has kept: a hook of
/// saved tensors, or one that changes the routing, would make kernels use rows that do not exist.
inline void expect_kept(const BackwardCall& a, std::int64_t h_bytes, std::int64_t saved_bytes) {
  const auto expect = [](const char* name, const Array& t, std::int64_t bytes) {
    const std::int64_t have = t.numel() * static_cast<std::int64_t>(t.element_size());
    if (have == bytes) return;
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(have) +
                                " bytes, must have the " + std::to_string(bytes) +
                                " that forward has kept for this routing");
  };
  expect("h", a.h, h_bytes);
  expect("saved", a.saved, saved_bytes);
}

/// All arguments of a backward except its scratch.
inline sonicmoe::BackwardArgs backward_args(BackwardCall& a, const Call& c,
                                            const sonicmoe::Weights& grads, const MaybeArray& dx,
                                            const MaybeArray& dweights, sonicmoe::GradMode mode) {
  a.dout = readable_rows(a.dout, "grad");
  a.h = owned_bytes(a.h, "h", keeps_codes(c.problem) ? ScalarType::Byte : a.x.scalar_type());
  a.saved = owned_bytes(a.saved, "saved", ScalarType::Byte);
  sonicmoe::BackwardArgs args;
  args.x = c.x;
  args.routing = c.routing;
  args.weights = c.weights;
  args.dout = view(a.dout, "grad");
  args.h = lend(a.h);
  args.saved = lend(a.saved);
  args.dx = view(dx, "dx");
  args.dweights = view(dweights, "dweights");
  args.grads = grads;
  args.grad_mode = mode;
  return args;
}

/// Computes a backward with the layer of one process; RunTogether of exchange.h computes it over
/// several ranks.
struct RunAlone {
  const MaybeArray& fp8_weights;

  void operator()(BackwardCall& a, const sonicmoe::Weights& grads, const MaybeArray& dx,
                  const MaybeArray& dweights, sonicmoe::GradMode mode) const {
    const DeviceScope device(a.x);
    const Call c = call_of(a);
    const QuantisedWeights fp8(c, fp8_weights, a.x, device.exec());
    auto args = backward_args(a, c, grads, dx, dweights, mode);
    args.fp8_weights = fp8.buffer();
    const auto sizes = sonicmoe::moe_sizes(c.problem, sonicmoe::Pass::kBackward, device.exec());
    expect_kept(a, sizes.h_bytes, saved_capacity(c.problem));
    const Scratch scratch(a.x, sizes.scratch_bytes);
    args.scratch = scratch.buffer();
    sonicmoe::moe_backward(c.problem, args, device.exec());
  }
};

using LayerGradients = std::tuple<Array, Array, Array, Array, Array, Array, Array>;

/// Gradients in new tensors.
template <class Run>
LayerGradients written_gradients(BackwardCall& a, const Run& run) {
  const MaybeArray dx = gradient_of_x(a);
  const MaybeArray dweights = gradient_of(a, At::weights, a.weights);
  const MaybeArray dgate = gradient_of(a, At::w_gate, a.w_gate);
  const MaybeArray dup = gradient_of(a, At::w_up, a.w_up);
  const MaybeArray ddown = gradient_of(a, At::w_down, a.w_down);
  const MaybeArray db_up = gradient_of(a, At::b_up, a.b_up);
  const MaybeArray db_down = gradient_of(a, At::b_down, a.b_down);
  run(a, weights_of(a, dgate, dup, ddown, db_up, db_down), dx, dweights,
      sonicmoe::GradMode::kWrite);
  return {or_nothing(dx, a.x),     or_nothing(dweights, a.x), or_nothing(dgate, a.x),
          or_nothing(dup, a.x),    or_nothing(ddown, a.x),    or_nothing(db_up, a.x),
          or_nothing(db_down, a.x)};
}

using AloneBackwardCall = Joined<BackwardCall, Fp8Argument>;

inline LayerGradients moe_backward(AloneBackwardCall& a) {
  return written_gradients(a, RunAlone{a.fp8_weights});
}

/// MainGradients as arguments to which the operator adds ("a!" in the schema).
struct Accumulated {
  MaybeArray g_gate;
  Array g_up;
  Array g_down;
  auto fields() { return std::tie(g_gate, g_up, g_down); }
  static std::string schema() { return "Tensor(a!)? g_gate, Tensor(b!) g_up, Tensor(c!) g_down"; }
};
using AccumulateCall = Joined<BackwardCall, Accumulated>;

/// The gradients that are not added to g_*: of x, weights and biases.
using FreshGradients = std::tuple<Array, Array, Array, Array>;

/// Adds the gradients of the weights that `needs` names to g_*. Bias gradients are new tensors in
/// the dtype of g_*.
template <class Run>
FreshGradients accumulated_gradients(AccumulateCall& a, const Run& run) {
  const MaybeArray dx = gradient_of_x(a);
  const MaybeArray dweights = gradient_of(a, At::weights, a.weights);
  const auto zeros = [&](At argument, const MaybeArray& of) -> MaybeArray {
    if (!needs(a, argument) || !of.has_value()) return std::nullopt;
    return torch::stable::new_zeros(*of, of->sizes(), score_dtype(a.x));
  };
  const MaybeArray db_up = zeros(At::b_up, a.b_up);
  const MaybeArray db_down = zeros(At::b_down, a.b_down);
  const auto sum = [&](At argument, const MaybeArray& into) {
    return needs(a, argument) ? into : std::nullopt;
  };
  const auto sums = weights_of(a, sum(At::w_gate, a.g_gate), sum(At::w_up, a.g_up),
                               sum(At::w_down, a.g_down), db_up, db_down);
  run(a, sums, dx, dweights, sonicmoe::GradMode::kAccumulate);
  return {or_nothing(dx, a.x), or_nothing(dweights, a.x), or_nothing(db_up, a.x),
          or_nothing(db_down, a.x)};
}

using AloneAccumulateCall = Joined<AccumulateCall, Fp8Argument>;

inline FreshGradients moe_backward_accumulate(AloneAccumulateCall& a) {
  return accumulated_gradients(a, RunAlone{a.fp8_weights});
}

}  // namespace sonicmoe_torch
