// For the files of kernels/: the address of a kernel, and the choice of a kernel by its variant.
#pragma once

#include "cuda/portable/engine/kernel.cuh"
#include "cuda/portable/kernels.h"

namespace sonicmoe::cuda::portable {

template <class K>
const void* address_of() {
  return reinterpret_cast<const void*>(product_kernel<K>);
}

/// Calls make.template operator()<Element, Shape>() with the element type and depth of a variant.
template <Width kWidth, class Make>
const void* for_variant(const Variant& variant, const Make& make) {
  const auto of_depth = [&]<Depth kDepth>() {
    using Tile = Shape<kDepth, kWidth>;
    return variant.dtype == DType::kBF16 ? make.template operator()<__nv_bfloat16, Tile>()
                                         : make.template operator()<__half, Tile>();
  };
  return variant.shape.depth == Depth::k64 ? of_depth.template operator()<Depth::k64>()
                                           : of_depth.template operator()<Depth::k32>();
}

}  // namespace sonicmoe::cuda::portable
