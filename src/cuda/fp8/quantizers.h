// The quantisers of Precision::kFp8, for every engine that has it. They are compiled for the
// architectures of these engines.
#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

void fp8_quantize_rows(const Device& device, const QuantizeRows& work, cudaStream_t stream);
void fp8_quantize_weights(const Device& device, const Problem& problem, const Weights& weights,
                          const Buffer& out, cudaStream_t stream);

inline constexpr Quantizers kQuantizers = {&fp8_quantize_rows, &fp8_quantize_weights};

}  // namespace sonicmoe::cuda
