// For the files of kernels/ with a row product: the choice of a kernel of one epilogue.
#pragma once

#include "cuda/portable/instances/instances.cuh"
#include "cuda/portable/producers/rows.cuh"

namespace sonicmoe::cuda::portable {

template <class Element, class Tile, Order kOrder, class Epilogue>
using RowKernel = Kernel<Element, RowLoader<Tile, kOrder, Epilogue>, Epilogue>;

/// `AlongK` and `AcrossK` are the epilogues for the two orders of the weights.
template <template <class> class AlongK, template <class> class AcrossK = AlongK,
          Width kWidth = Width::k256>
const void* row_kernel(const Variant& variant, WeightOrder order) {
  return for_variant<kWidth>(variant, [&]<class Element, class Tile>() {
    return order == WeightOrder::kAlongDepth
               ? address_of<RowKernel<Element, Tile, Order::kAlongK, AlongK<Element>>>()
               : address_of<RowKernel<Element, Tile, Order::kAcrossK, AcrossK<Element>>>();
  });
}

}  // namespace sonicmoe::cuda::portable
