#include "cuda/portable/epilogues/activate.cuh"
#include "cuda/portable/epilogues/activate_staged.cuh"
#include "cuda/portable/instances/row_instances.cuh"

namespace sonicmoe::cuda::portable {

const void* activate_kernel(const Variant& variant, Major major) {
  return row_kernel<Activate, ActivateStaged>(variant, major);
}

}  // namespace sonicmoe::cuda::portable
