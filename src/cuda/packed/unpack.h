// Unpacking of packed weights on the GPU.
#pragma once

#include "sonicmoe/packed.h"

namespace sonicmoe::cuda {

void unpack_weights(const PackedWeights& packed, const Tensor& out, const Exec& exec);

}  // namespace sonicmoe::cuda
