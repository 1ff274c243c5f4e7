#include "cuda/portable/epilogues/activate_grad.cuh"
#include "cuda/portable/instances/row_instances.cuh"

namespace sonicmoe::cuda::portable {
namespace {

template <class Element>
using Wide = ActivateGrad<Element, Width::k256>;
template <class Element>
using Narrow = ActivateGrad<Element, Width::k128>;

}  // namespace

const void* activate_grad_kernel(const Variant& variant, Major major) {
  return variant.shape.width == Width::k256
             ? row_kernel<Wide>(variant, major)
             : row_kernel<Narrow, Narrow, Width::k128>(variant, major);
}

}  // namespace sonicmoe::cuda::portable
