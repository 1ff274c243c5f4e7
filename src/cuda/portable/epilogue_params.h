// The arguments of the epilogues of row products, from their descriptions.
#pragma once

#include "cuda/layer/product.h"
#include "cuda/portable/params.h"

namespace sonicmoe::cuda::portable {

StoreParams epilogue_params(const StoreOutput& epilogue);
ActivateParams epilogue_params(const Activate& epilogue);
ActivateGradParams epilogue_params(const ActivateGrad& epilogue);

}  // namespace sonicmoe::cuda::portable
