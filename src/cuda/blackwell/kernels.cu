#include "cuda/blackwell/engine/kernel.cuh"
#include "cuda/blackwell/epilogues/activate.cuh"
#include "cuda/blackwell/epilogues/activate_grad.cuh"
#include "cuda/blackwell/epilogues/store.cuh"
#include "cuda/blackwell/epilogues/store_expert.cuh"
#include "cuda/blackwell/kernels.h"

namespace sonicmoe::cuda::blackwell {
namespace {

template <template <class> class Product, template <class> class Epilogue>
const void* kernel_of(DType dtype) {
  return dtype == DType::kBF16
             ? reinterpret_cast<const void*>(pair_product<Product<Epilogue<__nv_bfloat16>>>)
             : reinterpret_cast<const void*>(pair_product<Product<Epilogue<__half>>>);
}

}  // namespace

const void* store_kernel(DType dtype) { return kernel_of<RowProductOf, Store>(dtype); }
const void* activate_kernel(DType dtype) { return kernel_of<RowProductOf, Activate>(dtype); }
const void* activate_grad_kernel(DType dtype) {
  return kernel_of<RowProductOf, ActivateGrad>(dtype);
}
const void* store_expert_kernel(DType dtype) {
  return kernel_of<DepthProductOf, StoreExpert>(dtype);
}

}  // namespace sonicmoe::cuda::blackwell
