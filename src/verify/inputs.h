// The tensors of one case: placed in guarded blocks as its layout says, filled as its data says.
#pragma once

#include "verify/placing.h"

namespace sonicmoe::verify {

struct Tensors {
  Placed x, dout;
  PlacedRouting routing;
  PlacedWeights weights;
  // Outputs.
  Placed out, dx, dweights;
  PlacedWeights grads;
};

/// Places and fills the inputs on the host. Whatever no row needs is NaN: rows of x and dout that
/// are routed nowhere, weights of empty slots, the gaps of padded layouts.
Tensors make_tensors(const Case& c, Blocks& blocks);

/// The operands of a grouped GEMM: a as rows, b as weights (varlen-M) or as rows.
void fill_operands(const Case& c, const Placed& a, const Placed& b);

/// Logits as the case's router wants them, and normal values.
void fill_logits(const Case& c, const Placed& logits);
void fill_normal(const Case& c, std::uint64_t stream, const Placed& placed);

/// What gradients that are accumulated hold beforehand; the same on every call.
void fill_initial_grads(const Case& c, const PlacedWeights& grads);

}  // namespace sonicmoe::verify
