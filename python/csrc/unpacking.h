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
  return infer(a, c.call, {{}, &c.packed}, device.exec());
}

inline std::tuple<Array, Array, Array> unpacking_forward(UnpackingCall& a) {
  const DeviceScope device(a.x);
  const PackedLayerCall c = packed_call_of(a, a, a);
  return forward_to_keep(a, c.call, {{}, &c.packed}, device.exec());
}

using UnpackingBackwardCall = Joined<BackwardCall, Factors, PackedOperands>;

/// The gradients of x, the routing weights, b_up, b_down, up_a, up_b, down_a and down_b.
inline std::tuple<Array, Array, Array, Array, Array, Array, Array, Array> unpacking_backward(
    UnpackingBackwardCall& a) {
  const DeviceScope device(a.x);
  const PackedLayerCall c = packed_call_of(a, a, a);
  const FrozenGradients d = frozen_gradients(a, a, c.call, {{}, &c.packed}, device.exec());
  return std::tuple_cat(std::tuple(or_nothing(d.dx, a.x), or_nothing(d.dweights, a.x),
                                   or_nothing(d.db_up, a.x), or_nothing(d.db_down, a.x)),
                        all_or_nothing(d.factors, a.x));
}

}  // namespace sonicmoe_torch
