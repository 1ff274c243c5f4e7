// Functions of the layer on CUDA; cuda/backend.cc puts them in the backend's table.
#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

/// Refuses a problem that `engine` does not serve. The other functions rely on it.
Sizes moe_sizes(const Problem& problem, Pass pass, const Engine& engine);
void quantize_weights(const Problem& problem, const Weights& weights, const Buffer& out,
                      const Exec& exec);
void moe_forward(const Problem& problem, const ForwardArgs& args, const Exec& exec);
void moe_backward(const Problem& problem, const BackwardArgs& args, const Exec& exec);
/// The same on packed weights: args.weights is memory for some of the experts.
void packed_forward(const Problem& problem, const ForwardArgs& args, const PackedLayer& packed,
                    const Exec& exec);
void packed_backward(const Problem& problem, const BackwardArgs& args, const PackedLayer& packed,
                     const Exec& exec);

}  // namespace sonicmoe::cuda
