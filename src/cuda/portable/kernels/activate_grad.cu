#include "cuda/portable/epilogues/activate_grad.cuh"
#include "cuda/portable/instances.cuh"
#include "cuda/portable/loaders/rows.cuh"

namespace sonicmoe::cuda::portable {
namespace {

template <class Element, Depth kDepth>
const void* kernel(WeightOrder order) {
  using enum Order;
  return order == WeightOrder::kAlongDepth
             ? address_of<Kernel<Element, RowLoader<kDepth, kAlongK>, ActivateGrad<Element>>>()
             : address_of<Kernel<Element, RowLoader<kDepth, kAcrossK>, ActivateGrad<Element>>>();
}

}  // namespace

const void* activate_grad_kernel(const Variant& variant, WeightOrder order) {
  return for_variant(variant,
                     [&]<class Element, Depth kDepth>() { return kernel<Element, kDepth>(order); });
}

}  // namespace sonicmoe::cuda::portable
