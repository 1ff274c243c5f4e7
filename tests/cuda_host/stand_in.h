// An engine and the sums of a pass on host memory, in fp32 and as plainly as they can be written:
// the meaning of every field of a product. It needs no GPU.
#pragma once

#include "cuda/layer/passes.h"

namespace sonicmoe::testing {

/// Serves compute capability 0.7, which no device has.
const cuda::Engine& stand_in_engine();

/// Computes the steps of a pass in order, products by `engine`.
void run_on_host(const cuda::Steps& steps, const cuda::PassContext& pass,
                 const cuda::Engine& engine);

}  // namespace sonicmoe::testing
