// Launches of the quantisers.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device/device.h"
#include "cuda/layer/fp8_product.h"

namespace sonicmoe::cuda {

void fp8_quantize_rows(const Device& device, const QuantizeRows& work, cudaStream_t stream);
void fp8_quantize_weights(const Device& device, const Problem& problem, const Weights& weights,
                          const Buffer& out, cudaStream_t stream);

}  // namespace sonicmoe::cuda
