#include "cuda/portable/epilogues/store_expert.cuh"
#include "cuda/portable/instances/instances.cuh"
#include "cuda/portable/producers/depth.cuh"

namespace sonicmoe::cuda::portable {
namespace {

template <class Element, class Tile>
const void* kernel(GatheredSide side) {
  using enum Side;
  return side == GatheredSide::kLeft
             ? address_of<Kernel<Element, DepthProducer<Tile, kLeft>, StoreExpert<Element>>>()
             : address_of<Kernel<Element, DepthProducer<Tile, kRight>, StoreExpert<Element>>>();
}

}  // namespace

const void* store_expert_kernel(const Variant& variant, GatheredSide side) {
  return for_variant<Width::k256>(
      variant, [&]<class Element, class Tile>() { return kernel<Element, Tile>(side); });
}

}  // namespace sonicmoe::cuda::portable
