#include "cuda/portable/epilogues/store.cuh"
#include "cuda/portable/instances/row_instances.cuh"

namespace sonicmoe::cuda::portable {

const void* store_kernel(const Variant& variant, Major major) {
  return row_kernel<Store>(variant, major);
}

}  // namespace sonicmoe::cuda::portable
