// Products of codes, and quantisers, as launches of FP8 kernels.
#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

/// The product has scales.
void fp8_multiply_rows(const Device& device, const RowProduct& product, cudaStream_t stream);

void fp8_quantize_rows(const Device& device, const QuantizeRows& work, cudaStream_t stream);
void fp8_quantize_weights(const Device& device, const Problem& problem, const Weights& weights,
                          const Buffer& out, cudaStream_t stream);

}  // namespace sonicmoe::cuda
