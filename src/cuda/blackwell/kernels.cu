#include "cuda/blackwell/engine/kernel.cuh"
#include "cuda/blackwell/epilogues/activate.cuh"
#include "cuda/blackwell/epilogues/activate_grad.cuh"
#include "cuda/blackwell/epilogues/store.cuh"
#include "cuda/blackwell/kernels.h"

namespace sonicmoe::cuda::blackwell {
namespace {

template <template <class> class Epilogue>
const void* kernel_of(DType dtype) {
  return dtype == DType::kBF16 ? reinterpret_cast<const void*>(row_product<Epilogue<__nv_bfloat16>>)
                               : reinterpret_cast<const void*>(row_product<Epilogue<__half>>);
}

}  // namespace

const void* store_kernel(DType dtype) { return kernel_of<Store>(dtype); }
const void* activate_kernel(DType dtype) { return kernel_of<Activate>(dtype); }
const void* activate_grad_kernel(DType dtype) { return kernel_of<ActivateGrad>(dtype); }

}  // namespace sonicmoe::cuda::blackwell
