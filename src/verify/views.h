// Creates guarded blocks and strided views into them, for every layout of the table of cases.
#pragma once

#include "verify/blocks.h"
#include "verify/cases.h"

namespace sonicmoe::verify {

struct WeightViews {
  BlockView gate, up, down, b_gate, b_up, b_down;

  Weights on_host() const;
  Weights on_device() const;
};

/// The scales of the case are part of the views.
struct FactorViews {
  BlockView up_a, up_b, up_gate_b, down_a, down_b;
  double up_scale = 1.0, down_scale = 1.0;

  Lora on_host() const;
  Lora on_device() const;
};

struct RoutingViews {
  BlockView ids, weights, token, expert, row_begin, row_count;

  Routing on_host() const;
  Routing on_device() const;
};

/// The strides of a shape: with padding after every row (kPadded), with reversed order of
/// dimensions (kReversed), else contiguous.
Tensor laid_out(Layout layout, DType dtype, std::initializer_list<std::int64_t> shape);

/// (E, rows, cols), transposed where the layout says so.
BlockView add_expert_matrices(const Case& c, const std::string& what, DType dtype,
                              std::initializer_list<std::int64_t> shape, Blocks& blocks);

/// An index tensor with its values.
BlockView add_integers(const std::string& what, const Tensor& view,
                       const std::vector<std::int64_t>& values, Blocks& blocks);

RoutingViews add_routing(const Case& c, Blocks& blocks);

struct WeightDTypes {
  DType weights;
  DType biases;
};
/// Weights and, if the case has them, biases; `prefix` names their blocks.
WeightViews add_weights(const Case& c, const std::string& prefix, WeightDTypes dtypes,
                        Blocks& blocks);
/// Low-rank factors of the ranks that the case has; `prefix` names their blocks.
FactorViews add_factors(const Case& c, const std::string& prefix, DType dtype, Blocks& blocks);

}  // namespace sonicmoe::verify
