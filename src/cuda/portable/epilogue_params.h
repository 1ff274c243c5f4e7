// The arguments of epilogues, from the descriptions of products.
#pragma once

#include "cuda/layer/product.h"
#include "cuda/portable/params.h"

namespace sonicmoe::cuda::portable {

StoreParams epilogue_params(const StoreOutput& epilogue);
ActivateParams epilogue_params(const Activate& epilogue);
ActivateGradParams epilogue_params(const ActivateGrad& epilogue);

/// Kernels of depth products store D along its rows. Whether the output is contiguous along its
/// columns instead: then the operands are swapped, and a kernel computes the transposed matrix.
bool is_transposed(const DepthProduct& product);
StoreExpertParams epilogue_params(const DepthProduct& product);

}  // namespace sonicmoe::cuda::portable
