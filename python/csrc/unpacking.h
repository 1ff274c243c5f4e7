// The layer on packed weights, with or without low-rank factors, as operators that unpack a few
// experts at a time: inference, forward, backward. On CUDA only.
#pragma once

#include <cstdint>
#include <tuple>

#include "arguments.h"
#include "device_scope.h"
#include "layer.h"
#include "lora.h"
#include "packed.h"
#include "sonicmoe/packed.h"
#include "views.h"

namespace sonicmoe_torch {

/// The arguments of PackedCall for an operand, which `prefix` names.
#define SONICMOE_PACKED_OPERAND(ARGUMENT, prefix) \
  ARGUMENT(Array, prefix##_codes)                 \
  ARGUMENT(Array, prefix##_scales)                \
  ARGUMENT(MaybeArray, prefix##_nested_map)       \
  ARGUMENT(MaybeArray, prefix##_nested_scales)    \
  ARGUMENT(MaybeArray, prefix##_nested_offset)    \
  ARGUMENT(std::int64_t, prefix##_format)         \
  ARGUMENT(std::int64_t, prefix##_block)
#define SONICMOE_PACKED_LAYER(ARGUMENT)   \
  SONICMOE_PACKED_OPERAND(ARGUMENT, up)   \
  SONICMOE_PACKED_OPERAND(ARGUMENT, down) \
  ARGUMENT(std::int64_t, experts) /* E */
struct PackedOperands {
  SONICMOE_ARGUMENTS(SONICMOE_PACKED_LAYER)
};

/// w_up and w_down are memory for E' experts each, (E', G*n, d) and (E', d, n).
using UnpackingCall = Joined<Layer, Factors, PackedOperands>;

struct PackedLayerCall {
  LoraCall call;
  sonicmoe::PackedLayer packed;
};

/// The shape of the packed tensor whose unpacked experts `memory` has.
inline PackedShape shape_in(const Array& memory, std::int64_t experts) {
  const bool transposed = memory.stride(2) != 1;
  return {experts, memory.size(transposed ? 2 : 1), memory.size(transposed ? 1 : 2)};
}

inline PackedLayerCall packed_call_of(Layer& a, const Factors& f, const PackedOperands& p) {
  PackedLayerCall c{lora_call_of(a, f), {}};
  c.call.layer.problem.experts = p.experts;
  const PackedCall up{p.up_codes,         p.up_scales, p.up_nested_map, p.up_nested_scales,
                      p.up_nested_offset, p.up_format, p.up_block};
  const PackedCall down{p.down_codes,         p.down_scales,        p.down_nested_map,
                        p.down_nested_scales, p.down_nested_offset, p.down_format,
                        p.down_block};
  c.packed.up = packed_weights(up, shape_in(a.w_up, p.experts));
  c.packed.down = packed_weights(down, shape_in(a.w_down, p.experts));
  return c;
}

inline Array unpacking_inference(UnpackingCall& a) {
  const DeviceScope device(a.x);
  const PackedLayerCall c = packed_call_of(a, a, a);
  const Call& l = c.call.layer;
  const auto sizes = sonicmoe::moe_sizes(l.problem, sonicmoe::Pass::kInference, device.exec());
  Array out = empty(a.x, {a.x.size(0), a.x.size(1)}, a.x.scalar_type());
  const Scratch scratch(a.x, sizes.scratch_bytes);
  sonicmoe::moe_forward(
      l.problem,
      {l.x, l.routing, l.weights, view(out, "out"), {}, {}, scratch.buffer(), {}, c.call.lora},
      c.packed, device.exec());
  return out;
}

inline std::tuple<Array, Array, Array> unpacking_forward(UnpackingCall& a) {
  const DeviceScope device(a.x);
  const PackedLayerCall c = packed_call_of(a, a, a);
  const Call& l = c.call.layer;
  const auto sizes = sonicmoe::moe_sizes(l.problem, sonicmoe::Pass::kForward, device.exec());
  Array out = empty(a.x, {a.x.size(0), a.x.size(1)}, a.x.scalar_type());
  Array h = new_kept_h(a.x, l.problem, sizes.h_bytes);
  Array saved = new_bytes(a.x, lora_saved_bytes(l.problem));
  const Scratch scratch(a.x, sizes.scratch_bytes);
  sonicmoe::moe_forward(l.problem,
                        {l.x,
                         l.routing,
                         l.weights,
                         view(out, "out"),
                         lend(h),
                         lend(saved),
                         scratch.buffer(),
                         {},
                         c.call.lora},
                        c.packed, device.exec());
  return {out, h, saved};
}

using UnpackingBackwardCall = Joined<BackwardCall, Factors, PackedOperands>;

/// The gradients of x, the routing weights, b_up, b_down, up_a, up_b, down_a and down_b.
inline std::tuple<Array, Array, Array, Array, Array, Array, Array, Array> unpacking_backward(
    UnpackingBackwardCall& a) {
  const DeviceScope device(a.x);
  const PackedLayerCall c = packed_call_of(a, a, a);
  const sonicmoe::Problem& problem = c.call.layer.problem;
  const MaybeArray dx = gradient_of_x(a);
  const MaybeArray dweights = gradient_of(a, At::weights, a.weights);
  const MaybeArray db_up = gradient_of(a, At::b_up, a.b_up);
  const MaybeArray db_down = gradient_of(a, At::b_down, a.b_down);
  const Factors grads = gradients_of(a.needs, a);
  auto args = backward_args(a, c.call.layer, weights_of(a, {}, {}, {}, db_up, db_down), dx,
                            dweights, sonicmoe::GradMode::kWrite);
  args.lora = c.call.lora;
  args.lora_grads = lora_of(a, grads);
  const auto sizes = sonicmoe::moe_sizes(problem, sonicmoe::Pass::kBackward, device.exec());
  expect_kept(a, sizes.h_bytes, lora_saved_bytes(problem));
  const Scratch scratch(a.x, sizes.scratch_bytes);
  args.scratch = scratch.buffer();
  sonicmoe::moe_backward(problem, args, c.packed, device.exec());
  return {or_nothing(dx, a.x),           or_nothing(dweights, a.x),    or_nothing(db_up, a.x),
          or_nothing(db_down, a.x),      or_nothing(grads.up_a, a.x),  or_nothing(grads.up_b, a.x),
          or_nothing(grads.down_a, a.x), or_nothing(grads.down_b, a.x)};
}

}  // namespace sonicmoe_torch
