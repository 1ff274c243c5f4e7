// Products as launches of Hopper's kernels (row_products.cc, depth_products.cc, describe.cc).
#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

void hopper_multiply_rows(const Device& device, const RowProduct& product, cudaStream_t stream);
void hopper_multiply_depth(const Device& device, const DepthProduct& product, cudaStream_t stream);
std::vector<TileChoice> hopper_tiles(const Problem& problem);

}  // namespace sonicmoe::cuda
