// Row products of packed weights: those of a layer whose rows of codes are contiguous along d for
// W1 and along n for W2. They have bf16 elements and the wide tile of depth 32, which the cards
// have that need them.
#include "cuda/portable/epilogues/activate.cuh"
#include "cuda/portable/epilogues/activate_grad.cuh"
#include "cuda/portable/epilogues/store.cuh"
#include "cuda/portable/instances/instances.cuh"
#include "cuda/portable/producers/fp8_line.cuh"
#include "cuda/portable/producers/packed_line.cuh"
#include "cuda/portable/producers/rows.cuh"

namespace sonicmoe::cuda::portable {
namespace {

using Element = __nv_bfloat16;
using Tile = Shape<kPackedShape.depth, kPackedShape.width>;

template <Major kMajor, class Epilogue, class Weights>
const void* kernel_of() {
  return address_of<Kernel<Element, RowProducer<Tile, kMajor, Epilogue, Weights>, Epilogue>>();
}

template <Major kMajor, class Epilogue>
const void* kernel(Codes codes) {
  return codes == Codes::kFp8 ? kernel_of<kMajor, Epilogue, Fp8<Element>>()
                              : kernel_of<kMajor, Epilogue, Digits<Element>>();
}

}  // namespace

const void* packed_store_kernel(Codes codes, Major major) {
  return major == Major::kK ? kernel<Major::kK, Store<Element>>(codes)
                            : kernel<Major::kMN, Store<Element>>(codes);
}
const void* packed_activate_kernel(Codes codes) {
  return kernel<Major::kK, Activate<Element>>(codes);
}
const void* packed_activate_grad_kernel(Codes codes) {
  return kernel<Major::kMN, ActivateGrad<Element, kPackedShape.width>>(codes);
}

}  // namespace sonicmoe::cuda::portable
