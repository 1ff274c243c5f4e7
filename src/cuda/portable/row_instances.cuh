// For the files of kernels/ with a row product: the choice of a kernel of one epilogue.
#pragma once

#include "cuda/portable/instances.cuh"
#include "cuda/portable/loaders/rows.cuh"

namespace sonicmoe::cuda::portable {

template <template <class> class Epilogue, Width kWidth = Width::k256>
const void* row_kernel(const Variant& variant, WeightOrder order) {
  return for_variant<kWidth>(variant, [&]<class Element, class Tile>() {
    return order == WeightOrder::kAlongDepth
               ? address_of<Kernel<Element, RowLoader<Tile, Order::kAlongK>, Epilogue<Element>>>()
               : address_of<Kernel<Element, RowLoader<Tile, Order::kAcrossK>, Epilogue<Element>>>();
  });
}

}  // namespace sonicmoe::cuda::portable
