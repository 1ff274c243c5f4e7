// Functions of kBlackwellEngine (blackwell_engine.cc).
#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda::blackwell {

void multiply_rows(const Device& device, const RowProduct& product, cudaStream_t stream);
void multiply_depth(const Device& device, const DepthProduct& product, cudaStream_t stream);

}  // namespace sonicmoe::cuda::blackwell
