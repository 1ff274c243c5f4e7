#include "cuda/portable/epilogues/store.cuh"
#include "cuda/portable/instances/row_instances.cuh"

namespace sonicmoe::cuda::portable {

const void* store_kernel(const Variant& variant, WeightOrder order) {
  return row_kernel<Store>(variant, order);
}

}  // namespace sonicmoe::cuda::portable
