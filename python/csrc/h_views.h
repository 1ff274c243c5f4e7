// Where gate and up lie in H, as an operator.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "boxing.h"
#include "place.h"
#include "sonicmoe/moe.h"
#include "views.h"

namespace sonicmoe_torch {

struct HViewsCall {
  Array h;  // (C, G*n)
  MaybeArray w_gate;
  Array w_up;
  std::string activation;
  std::string gate_layout;
  auto fields() { return std::tie(h, w_gate, w_up, activation, gate_layout); }
};
constexpr const char* kHViewsSchema =
    "Tensor h, Tensor? w_gate, Tensor w_up, str activation, str gate_layout";

/// (where up begins, stride of rows, stride of columns) in elements; gate begins at 0.
inline std::tuple<std::int64_t, std::int64_t, std::int64_t> h_views(HViewsCall& a) {
  const Place place(a.h);
  expect_rank(a.h, 2, "h");
  expect_rank(a.w_up, 3, "w_up");
  sonicmoe::Problem problem;
  problem.activation.kind = sonicmoe::activation_from_name(a.activation.c_str());
  const bool fused = sonicmoe::is_gated(problem.activation.kind) && !a.w_gate.has_value();
  const Halves first = gate_and_up(a.w_gate, a.w_up, fused, a.gate_layout);
  problem.form = sonicmoe::RoutingForm::kPairs;
  problem.capacity = a.h.size(0);
  problem.experts = first.up.shape[0];
  problem.width = first.up.shape[1];
  problem.hidden = first.up.shape[2];
  problem.dtype = dtype_of(a.h, "h");
  sonicmoe::Weights weights;
  weights.gate = first.gate;
  weights.up = first.up;
  const auto views = sonicmoe::h_views(problem, weights, lend(a.h), place.exec());
  const auto bytes = static_cast<char*>(views.up.data) - static_cast<char*>(a.h.data_ptr());
  return {bytes / sonicmoe::dtype_bytes(problem.dtype), views.up.stride[0], views.up.stride[1]};
}

}  // namespace sonicmoe_torch
