#include "cuda/portable/epilogues/store.cuh"
#include "cuda/portable/instances.cuh"
#include "cuda/portable/loaders/rows.cuh"

namespace sonicmoe::cuda::portable {
namespace {

template <class Element, Depth kDepth>
const void* kernel(WeightOrder order) {
  using enum Order;
  return order == WeightOrder::kAlongDepth
             ? address_of<Kernel<Element, RowLoader<kDepth, kAlongK>, Store<Element>>>()
             : address_of<Kernel<Element, RowLoader<kDepth, kAcrossK>, Store<Element>>>();
}

}  // namespace

const void* store_kernel(const Variant& variant, WeightOrder order) {
  return for_variant(variant,
                     [&]<class Element, Depth kDepth>() { return kernel<Element, kDepth>(order); });
}

}  // namespace sonicmoe::cuda::portable
