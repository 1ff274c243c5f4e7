#include "cuda/portable/epilogues/store_expert.cuh"
#include "cuda/portable/instances.cuh"
#include "cuda/portable/loaders/depth.cuh"

namespace sonicmoe::cuda::portable {
namespace {

template <class Element, Depth kDepth>
const void* kernel(GatheredSide side) {
  using enum Side;
  return side == GatheredSide::kLeft
             ? address_of<Kernel<Element, DepthLoader<kDepth, kLeft>, StoreExpert<Element>>>()
             : address_of<Kernel<Element, DepthLoader<kDepth, kRight>, StoreExpert<Element>>>();
}

}  // namespace

const void* store_expert_kernel(const Variant& variant, GatheredSide side) {
  return for_variant(variant,
                     [&]<class Element, Depth kDepth>() { return kernel<Element, kDepth>(side); });
}

}  // namespace sonicmoe::cuda::portable
