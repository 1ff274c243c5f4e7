// An operator that returns the positions of gate and up in H.
#pragma once

#include <cstdint>
#include <tuple>

#include "arguments.h"
#include "device_scope.h"
#include "layer.h"
#include "sonicmoe/moe.h"
#include "views.h"

namespace sonicmoe_torch {

#define SONICMOE_H_VIEWS(ARGUMENT)   \
  ARGUMENT(Array, h) /* (C, G*n) */  \
  ARGUMENT(MaybeArray, w_gate)       \
  ARGUMENT(Array, w_up)              \
  ARGUMENT(std::int64_t, activation) \
  ARGUMENT(std::int64_t, gate_layout)
struct HViewsCall {
  SONICMOE_ARGUMENTS(SONICMOE_H_VIEWS)
};

/// Returns (offset of up in H, row stride, column stride) in elements. Gate has offset 0 and the
/// same strides.
inline std::tuple<std::int64_t, std::int64_t, std::int64_t> h_views(HViewsCall& a) {
  const DeviceScope device(a.h);
  expect_rank(a.h, 2, "h");
  expect_rank(a.w_up, 3, "w_up");
  sonicmoe::Problem problem;
  problem.activation.kind = activation_of(a.activation);
  const bool fused = sonicmoe::is_gated(problem.activation.kind) && !a.w_gate.has_value();
  const Halves first = gate_and_up(a.w_gate, a.w_up, fused, gate_layout_of(a.gate_layout));
  problem.form = sonicmoe::RoutingForm::kPairs;
  problem.capacity = a.h.size(0);
  problem.experts = first.up.shape[0];
  problem.width = first.up.shape[1];
  problem.hidden = first.up.shape[2];
  problem.dtype = dtype_of(a.h, "h");
  sonicmoe::Weights weights;
  weights.gate = first.gate;
  weights.up = first.up;
  const auto views = sonicmoe::h_views(problem, weights, lend(a.h), device.exec());
  const auto bytes = static_cast<char*>(views.up.data) - static_cast<char*>(a.h.data_ptr());
  return {bytes / sonicmoe::dtype_bytes(problem.dtype), views.up.stride[0], views.up.stride[1]};
}

}  // namespace sonicmoe_torch
