// For the files of kernels/ with a row product: the choice of a kernel of one epilogue.
#pragma once

#include "cuda/portable/instances.cuh"
#include "cuda/portable/loaders/rows.cuh"

namespace sonicmoe::cuda::portable {

template <template <class> class Epilogue>
const void* row_kernel(const Variant& variant, WeightOrder order) {
  return for_variant(variant, [&]<class Element, Depth kDepth>() {
    return order == WeightOrder::kAlongDepth
               ? address_of<Kernel<Element, RowLoader<kDepth, Order::kAlongK>, Epilogue<Element>>>()
               : address_of<
                     Kernel<Element, RowLoader<kDepth, Order::kAcrossK>, Epilogue<Element>>>();
  });
}

}  // namespace sonicmoe::cuda::portable
