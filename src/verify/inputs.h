// The tensors of one case in guarded blocks, in the case's layout and with its values.
#pragma once

#include "verify/views.h"

namespace sonicmoe::verify {

struct Tensors {
  BlockView x, dout;
  RoutingViews routing;
  WeightViews weights;
  FactorViews factors;
  // Outputs.
  BlockView out, dx, dweights;
  WeightViews grads;
  FactorViews factor_grads;
};

/// Creates all tensors and fills the inputs on the host. Elements that no routed row needs are NaN:
/// rows of x and dout of tokens without rows, weights of empty slots, the gaps of padded layouts.
Tensors make_tensors(const Case& c, Blocks& blocks);

/// The operands of a grouped GEMM: a is filled as rows, b as weights (varlen-M) or as rows
/// (varlen-K).
void fill_operands(const Case& c, const BlockView& a, const BlockView& b);

/// Fills logits as RouterCase::logits says, or any tensor with normal values.
void fill_logits(const Case& c, const BlockView& logits);
void fill_normal(const Case& c, std::uint64_t stream, const BlockView& tensor);

/// Initial values of accumulated gradients; the same on every call.
void fill_initial_grads(const Case& c, const Tensors& tensors);

}  // namespace sonicmoe::verify
