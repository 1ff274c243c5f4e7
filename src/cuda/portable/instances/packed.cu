// Row products of packed weights: those of a layer whose rows of codes are contiguous along d for
// W1 and along n for W2. They have bf16 elements and the wide tile of depth 32, which the cards
// have that need them.
#include "cuda/portable/epilogues/activate.cuh"
#include "cuda/portable/epilogues/activate_grad.cuh"
#include "cuda/portable/epilogues/store.cuh"
#include "cuda/portable/instances/instances.cuh"
#include "cuda/portable/producers/rows.cuh"

namespace sonicmoe::cuda::portable {
namespace {

using Element = __nv_bfloat16;
using Tile = Shape<kPackedShape.depth, kPackedShape.width>;

template <Major kMajor, class Epilogue>
const void* kernel() {
  return address_of<Kernel<Element, RowProducer<Tile, kMajor, Epilogue, Element>, Epilogue>>();
}

}  // namespace

const void* packed_store_kernel(Major major) {
  return major == Major::kK ? kernel<Major::kK, Store<Element>>()
                            : kernel<Major::kMN, Store<Element>>();
}
const void* packed_activate_kernel() { return kernel<Major::kK, Activate<Element>>(); }
const void* packed_activate_grad_kernel() {
  return kernel<Major::kMN, ActivateGrad<Element, kPackedShape.width>>();
}

}  // namespace sonicmoe::cuda::portable
