// The layer with low-rank factors beside frozen weights, as operators: inference, forward,
// backward.
#pragma once

#include <cstdint>
#include <tuple>

#include "arguments.h"
#include "device_scope.h"
#include "layer.h"
#include "sonicmoe/moe.h"
#include "sonicmoe/packed.h"
#include "views.h"

namespace sonicmoe_torch {

#define SONICMOE_FACTORS(ARGUMENT)                                             \
  ARGUMENT(MaybeArray, up_a)   /* (E, r, d) */                                 \
  ARGUMENT(MaybeArray, up_b)   /* (E, G*n, r), its rows as gate_layout says */ \
  ARGUMENT(MaybeArray, down_a) /* (E, r, n) */                                 \
  ARGUMENT(MaybeArray, down_b) /* (E, d, r) */                                 \
  ARGUMENT(double, up_scale)                                                   \
  ARGUMENT(double, down_scale)
struct Factors {
  SONICMOE_ARGUMENTS(SONICMOE_FACTORS)
};

inline sonicmoe::Lora lora_of(const Layer& a, const Factors& f) {
  const bool gated = sonicmoe::is_gated(activation_of(a.activation));
  const Halves rows = gate_and_up(std::nullopt, f.up_b, gated, gate_layout_of(a.gate_layout));
  sonicmoe::Lora lora;
  lora.up = {view(f.up_a, "up.a"), rows.up, rows.gate, f.up_scale};
  lora.down = {view(f.down_a, "down.a"), view(f.down_b, "down.b"), {}, f.down_scale};
  return lora;
}

struct LoraCall {
  Call layer;
  sonicmoe::Lora lora;
};

/// The call of a layer, and the ranks and the dtype of its factors.
inline LoraCall lora_call_of(Layer& a, const Factors& f) {
  LoraCall c{call_of(a), {}};
  for (const MaybeArray* t : {&f.up_a, &f.up_b, &f.down_a, &f.down_b}) {
    if (!t->has_value()) continue;
    expect_rank(**t, 3, "a factor");
    const bool wider = c.layer.problem.dtype != sonicmoe::DType::kF64;
    c.layer.problem.f32_factors = wider && (*t)->scalar_type() == ScalarType::Float;
  }
  if (f.up_a.has_value()) c.layer.problem.up_rank = f.up_a->size(1);
  if (f.down_a.has_value()) c.layer.problem.down_rank = f.down_a->size(1);
  c.lora = lora_of(a, f);
  return c;
}

/// What a call multiplies instead of the layer's weights, if anything.
struct OtherWeights {
  sonicmoe::Buffer fp8{};
  const sonicmoe::PackedLayer* packed = nullptr;
};

inline sonicmoe::ForwardArgs forward_args(const LoraCall& c, const OtherWeights& other,
                                          const Array& out, const Scratch& scratch) {
  const Call& l = c.layer;
  return {l.x, l.routing, l.weights, view(out, "out"), {}, {}, scratch.buffer(), other.fp8, c.lora};
}

inline void run_forward(const sonicmoe::Problem& problem, const sonicmoe::ForwardArgs& args,
                        const OtherWeights& other, const sonicmoe::Exec& exec) {
  other.packed == nullptr ? sonicmoe::moe_forward(problem, args, exec)
                          : sonicmoe::moe_forward(problem, args, *other.packed, exec);
}

inline Array infer(const Layer& a, const LoraCall& c, const OtherWeights& other,
                   const sonicmoe::Exec& exec) {
  const sonicmoe::Problem& problem = c.layer.problem;
  const auto sizes = sonicmoe::moe_sizes(problem, sonicmoe::Pass::kInference, exec);
  Array out = empty(a.x, {a.x.size(0), a.x.size(1)}, a.x.scalar_type());
  const Scratch scratch(a.x, sizes.scratch_bytes);
  run_forward(problem, forward_args(c, other, out, scratch), other, exec);
  return out;
}

/// Bytes of `saved`, which also holds P; _fakes.py has the same formula.
inline std::int64_t lora_saved_bytes(const sonicmoe::Problem& p) {
  const std::int64_t inner = sonicmoe::row_capacity(p) * p.up_rank;
  return saved_capacity(p) + inner * sonicmoe::dtype_bytes(p.dtype);
}

/// The output, H and metadata.
inline std::tuple<Array, Array, Array> forward_to_keep(const Layer& a, const LoraCall& c,
                                                       const OtherWeights& other,
                                                       const sonicmoe::Exec& exec) {
  const sonicmoe::Problem& problem = c.layer.problem;
  const auto sizes = sonicmoe::moe_sizes(problem, sonicmoe::Pass::kForward, exec);
  Array out = empty(a.x, {a.x.size(0), a.x.size(1)}, a.x.scalar_type());
  Array h = new_kept_h(a.x, problem, sizes.h_bytes);
  Array saved = new_bytes(a.x, lora_saved_bytes(problem));
  const Scratch scratch(a.x, sizes.scratch_bytes);
  auto args = forward_args(c, other, out, scratch);
  args.h = lend(h);
  args.saved = lend(saved);
  run_forward(problem, args, other, exec);
  return {out, h, saved};
}

using LoraInferenceCall = Joined<Layer, Factors, Fp8Argument>;

inline Array lora_inference(LoraInferenceCall& a) {
  const DeviceScope device(a.x);
  const LoraCall c = lora_call_of(a, a);
  const QuantisedWeights fp8(c.layer, a.fp8_weights, a.x, device.exec());
  return infer(a, c, {fp8.buffer()}, device.exec());
}

inline std::tuple<Array, Array, Array> lora_forward(LoraInferenceCall& a) {
  const DeviceScope device(a.x);
  const LoraCall c = lora_call_of(a, a);
  const QuantisedWeights fp8(c.layer, a.fp8_weights, a.x, device.exec());
  return forward_to_keep(a, c, {fp8.buffer()}, device.exec());
}

using LoraBackwardCall = Joined<BackwardCall, Factors, Fp8Argument>;

/// The bit of `needs` of a factor: after those of the layer's arguments.
enum class Factor : std::int32_t { up_a, up_b, down_a, down_b };

/// New tensors for the gradients of the factors that `needs` asks for.
inline Factors gradients_of(std::int64_t needs, const Factors& factors) {
  constexpr std::size_t kFirst = std::tuple_size_v<decltype(Layer().fields())>;
  const auto gradient = [needs](Factor factor, const MaybeArray& of) -> MaybeArray {
    const std::int64_t bit = static_cast<std::int64_t>(kFirst) + static_cast<std::int64_t>(factor);
    if ((needs >> bit & 1) == 0 || !of.has_value()) return std::nullopt;
    return empty_beside(*of);
  };
  Factors grads;
  grads.up_a = gradient(Factor::up_a, factors.up_a);
  grads.up_b = gradient(Factor::up_b, factors.up_b);
  grads.down_a = gradient(Factor::down_a, factors.down_a);
  grads.down_b = gradient(Factor::down_b, factors.down_b);
  return grads;
}

inline std::tuple<Array, Array, Array, Array> all_or_nothing(const Factors& f, const Array& like) {
  return {or_nothing(f.up_a, like), or_nothing(f.up_b, like), or_nothing(f.down_a, like),
          or_nothing(f.down_b, like)};
}

/// The gradients of a layer with frozen weights, as far as they are wanted.
struct FrozenGradients {
  MaybeArray dx, dweights, db_up, db_down;
  Factors factors;
};

inline FrozenGradients frozen_gradients(BackwardCall& a, const Factors& f, const LoraCall& c,
                                        const OtherWeights& other, const sonicmoe::Exec& exec) {
  const sonicmoe::Problem& problem = c.layer.problem;
  FrozenGradients d{gradient_of_x(a), gradient_of(a, At::weights, a.weights),
                    gradient_of(a, At::b_up, a.b_up), gradient_of(a, At::b_down, a.b_down),
                    gradients_of(a.needs, f)};
  auto args = backward_args(a, c.layer, weights_of(a, {}, {}, {}, d.db_up, d.db_down), d.dx,
                            d.dweights, sonicmoe::GradMode::kWrite);
  args.fp8_weights = other.fp8;
  args.lora = c.lora;
  args.lora_grads = lora_of(a, d.factors);
  const auto sizes = sonicmoe::moe_sizes(problem, sonicmoe::Pass::kBackward, exec);
  expect_kept(a, sizes.h_bytes, lora_saved_bytes(problem));
  const Scratch scratch(a.x, sizes.scratch_bytes);
  args.scratch = scratch.buffer();
  other.packed == nullptr ? sonicmoe::moe_backward(problem, args, exec)
                          : sonicmoe::moe_backward(problem, args, *other.packed, exec);
  return d;
}

/// The gradients of x, the routing weights, up_a, up_b, down_a and down_b.
inline std::tuple<Array, Array, Array, Array, Array, Array> lora_backward(LoraBackwardCall& a) {
  const DeviceScope device(a.x);
  const LoraCall c = lora_call_of(a, a);
  const QuantisedWeights fp8(c.layer, a.fp8_weights, a.x, device.exec());
  const FrozenGradients d = frozen_gradients(a, a, c, {fp8.buffer()}, device.exec());
  return std::tuple_cat(std::tuple(or_nothing(d.dx, a.x), or_nothing(d.dweights, a.x)),
                        all_or_nothing(d.factors, a.x));
}

}  // namespace sonicmoe_torch
