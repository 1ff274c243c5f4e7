// Functions of kPortableEngine (portable_engine.cc).
#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda::portable {

void multiply_rows(const Device& device, const RowProduct& product, cudaStream_t stream);
bool multiply_packed_rows(const Device& device, const PackedProduct& work, cudaStream_t stream);
void multiply_depth(const Device& device, const DepthProduct& product, cudaStream_t stream);

}  // namespace sonicmoe::cuda::portable
