// The compiled kernels. Host only.
#pragma once

#include "cuda/portable/shape.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda::portable {

/// Which kernel of a role.
struct Variant {
  DType dtype;  ///< kBF16 or kF16
  Depth depth;
};

/// Of products over rows: how the weights lie in memory.
enum class WeightOrder { kAlongDepth, kAcrossDepth };

/// Of products over depth: the tensor whose rows are gathered.
enum class GatheredSide { kLeft, kRight };

/// The kernel that stores D, activates it, or differentiates the activation.
const void* store_kernel(const Variant& variant, WeightOrder order);
const void* activate_kernel(const Variant& variant, WeightOrder order);
const void* activate_grad_kernel(const Variant& variant, WeightOrder order);
/// The kernel of a matrix for each expert.
const void* store_expert_kernel(const Variant& variant, GatheredSide side);

}  // namespace sonicmoe::cuda::portable
