// Functions of kBlackwellEngine (blackwell_engine.cc), and for its probe.
#pragma once

#include "cuda/blackwell/params.h"
#include "cuda/layer/engine.h"

namespace sonicmoe::cuda::blackwell {

void multiply_rows(const Device& device, const RowProduct& product, cudaStream_t stream);
void multiply_depth(const Device& device, const DepthProduct& product, cudaStream_t stream);
/// The same with a time limit of the kernel's waits.
void multiply_depth_within(const WaitLimit& limit, const Device& device,
                           const DepthProduct& product, cudaStream_t stream);
void multiply_rows_within(const WaitLimit& limit, const Device& device, const RowProduct& product,
                          cudaStream_t stream);

}  // namespace sonicmoe::cuda::blackwell
