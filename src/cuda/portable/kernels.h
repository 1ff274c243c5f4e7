// The compiled kernels. Host only.
#pragma once

#include "cuda/portable/shape.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda::portable {

/// Selects one of the kernels with the same epilogue.
struct Variant {
  DType dtype;      ///< kBF16 or kF16
  TileShape shape;  ///< narrow only for ActivateGrad
};

/// For row products: whether the weights are contiguous along the depth K (K-major) or not.
enum class WeightOrder { kAlongDepth, kAcrossDepth };

/// For depth products: the tensor whose rows are gathered.
enum class GatheredSide { kLeft, kRight };

/// Row products: with the epilogue Store, Activate or ActivateGrad.
const void* store_kernel(const Variant& variant, WeightOrder order);
const void* activate_kernel(const Variant& variant, WeightOrder order);
const void* activate_grad_kernel(const Variant& variant, WeightOrder order);
/// Depth products.
const void* store_expert_kernel(const Variant& variant, GatheredSide side);

}  // namespace sonicmoe::cuda::portable
