// Gradients of a list of pairs as a matrix.
#pragma once

#include "cuda/routing/launch.cuh"
#include "sonicmoe/routing.h"

namespace sonicmoe::cuda {

/// Fills `dense` (T, E) from dweight (C), zero where there is no pair.
void spread_gradients(const RouteParams& p, const Pairs& pairs, const Tensor& dweight, float* dense,
                      cudaStream_t stream);

}  // namespace sonicmoe::cuda
