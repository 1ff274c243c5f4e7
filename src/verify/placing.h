// Where tensors lie: the layouts of the table as strided views into guarded blocks.
#pragma once

#include "verify/blocks.h"
#include "verify/cases.h"

namespace sonicmoe::verify {

struct PlacedWeights {
  Placed gate, up, down, b_gate, b_up, b_down;

  Weights on_host() const;
  Weights on_device() const;
};

struct PlacedRouting {
  Placed ids, weights, token, expert, row_begin, row_count;

  Routing on_host() const;
  Routing on_device() const;
};

/// A view whose rows are followed by foreign elements (kPadded), that lies in reverse order
/// (kReversed), or that is contiguous.
Tensor laid_out(Layout layout, DType dtype, std::initializer_list<std::int64_t> shape);

/// (E, rows, cols), transposed where the layout says so.
Placed place_expert_matrices(const Case& c, const std::string& what, DType dtype,
                             std::initializer_list<std::int64_t> shape, Blocks& blocks);

/// An index tensor with its values.
Placed place_integers(const std::string& what, const Tensor& view,
                      const std::vector<std::int64_t>& values, Blocks& blocks);

PlacedRouting place_routing(const Case& c, Blocks& blocks);

struct WeightDTypes {
  DType weights;
  DType biases;
};
/// Weights and, if the case has them, biases; `prefix` names their blocks.
PlacedWeights place_weights(const Case& c, const std::string& prefix, WeightDTypes dtypes,
                            Blocks& blocks);

}  // namespace sonicmoe::verify
