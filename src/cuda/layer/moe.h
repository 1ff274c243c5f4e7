// Functions of the layer on CUDA; backend.cc puts them in the backend's table.
#pragma once

#include "core/backend_table.h"

namespace sonicmoe::cuda {

std::vector<TileChoice> layer_tiles(const Problem& problem, const Exec& exec);
Sizes moe_sizes(const Problem& problem, Pass pass, const Exec& exec);
void quantize_weights(const Problem& problem, const Weights& weights, const Buffer& out,
                      const Exec& exec);
void moe_forward(const Problem& problem, const ForwardArgs& args, const Exec& exec);
void moe_backward(const Problem& problem, const BackwardArgs& args, const Exec& exec);

}  // namespace sonicmoe::cuda
