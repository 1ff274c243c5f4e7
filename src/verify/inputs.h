// The tensors of one case: placed in guarded blocks as its layout says, filled as its data says.
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

/// What gradients that are accumulated hold beforehand; the same on every call.
void fill_initial_grads(const Case& c, const PlacedWeights& grads);

}  // namespace sonicmoe::verify
