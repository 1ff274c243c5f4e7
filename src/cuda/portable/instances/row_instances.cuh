// For the files of kernels/ with a row product: the choice of a kernel of one epilogue.
#pragma once

#include "cuda/portable/instances/instances.cuh"
#include "cuda/portable/producers/rows.cuh"

namespace sonicmoe::cuda::portable {

template <class Element, class Tile, Major kMajor, class Epilogue>
using RowKernel = Kernel<Element, RowProducer<Tile, kMajor, Epilogue>, Epilogue>;

/// `ForK` and `ForMN` are the epilogues for K-major and for other weights.
template <template <class> class ForK, template <class> class ForMN = ForK,
          Width kWidth = Width::k256>
const void* row_kernel(const Variant& variant, Major major) {
  return for_variant<kWidth>(variant, [&]<class Element, class Tile>() {
    return major == Major::kK ? address_of<RowKernel<Element, Tile, Major::kK, ForK<Element>>>()
                              : address_of<RowKernel<Element, Tile, Major::kMN, ForMN<Element>>>();
  });
}

}  // namespace sonicmoe::cuda::portable
