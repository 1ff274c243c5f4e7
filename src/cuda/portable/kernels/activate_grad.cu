#include "cuda/portable/epilogues/activate_grad.cuh"
#include "cuda/portable/row_instances.cuh"

namespace sonicmoe::cuda::portable {

const void* activate_grad_kernel(const Variant& variant, WeightOrder order) {
  return row_kernel<ActivateGrad>(variant, order);
}

}  // namespace sonicmoe::cuda::portable
