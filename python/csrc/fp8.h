// The operators quantize_weights and auto_fp8_rows.
#pragma once

#include <cstdint>

#include "arguments.h"
#include "device_scope.h"
#include "layer.h"
#include "sonicmoe/moe.h"
#include "views.h"

namespace sonicmoe_torch {

#define SONICMOE_WEIGHTS(ARGUMENT)   \
  ARGUMENT(MaybeArray, w_gate)       \
  ARGUMENT(Array, w_up)              \
  ARGUMENT(Array, w_down)            \
  ARGUMENT(std::int64_t, activation) \
  ARGUMENT(std::int64_t, gate_layout)
struct WeightsCall {
  SONICMOE_ARGUMENTS(SONICMOE_WEIGHTS)
};

/// The Problem of a layer with these weights and no rows.
inline sonicmoe::Problem problem_of_weights(const Array& w_down, std::int64_t activation) {
  sonicmoe::Problem problem;
  problem.form = sonicmoe::RoutingForm::kGrouped;
  problem.experts = w_down.size(0);
  problem.hidden = w_down.size(1);
  problem.width = w_down.size(2);
  problem.dtype = dtype_of(w_down, "w_down");
  problem.activation.kind = activation_of(activation);
  return problem;
}

/// Quantises the weights of a layer; the result is the buffer `fp8_weights` as a uint8 tensor.
inline Array quantize_weights(WeightsCall& a) {
  const DeviceScope device(a.w_down);
  expect_rank(a.w_up, 3, "w_up");
  expect_rank(a.w_down, 3, "w_down");
  if (a.w_gate.has_value()) expect_rank(*a.w_gate, 3, "w_up");
  sonicmoe::Problem problem = problem_of_weights(a.w_down, a.activation);
  problem.precision = sonicmoe::Precision::kFp8;
  const bool fused = sonicmoe::is_gated(problem.activation.kind) && !a.w_gate.has_value();
  const Halves first = gate_and_up(a.w_gate, a.w_up, fused, gate_layout_of(a.gate_layout));
  sonicmoe::Weights weights;
  weights.gate = first.gate;
  weights.up = first.up;
  weights.down = view(a.w_down, "w_down");
  const std::int64_t bytes = sonicmoe::fp8_weights_bytes(problem, device.exec());
  Array out = new_bytes(a.w_down, bytes);
  sonicmoe::quantize_weights(problem, weights, lend(out), device.exec());
  return out;
}

#define SONICMOE_AUTO_ROWS(ARGUMENT) \
  ARGUMENT(Array, w_down)            \
  ARGUMENT(std::int64_t, activation)
struct AutoRowsCall {
  SONICMOE_ARGUMENTS(SONICMOE_AUTO_ROWS)
};

/// The smallest row capacity at which precision="auto" takes fp8.
inline std::int64_t auto_fp8_rows(AutoRowsCall& a) {
  const DeviceScope device(a.w_down);
  expect_rank(a.w_down, 3, "w_down");
  return sonicmoe::auto_fp8_rows(problem_of_weights(a.w_down, a.activation), device.exec());
}

}  // namespace sonicmoe_torch
