// Products of codes as launches of FP8 kernels.
#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

/// The product has scales.
void fp8_multiply_rows(const Device& device, const RowProduct& product, cudaStream_t stream);

}  // namespace sonicmoe::cuda
