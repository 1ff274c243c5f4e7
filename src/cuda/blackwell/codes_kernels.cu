#include "cuda/blackwell/engine/codes.cuh"
#include "cuda/blackwell/epilogues/codes_activate.cuh"
#include "cuda/blackwell/epilogues/codes_activate_grad.cuh"
#include "cuda/blackwell/epilogues/store.cuh"
#include "cuda/blackwell/kernels.h"

namespace sonicmoe::cuda::blackwell {
namespace {

template <class Epilogue>
const void* kernel_of() {
  return reinterpret_cast<const void*>(pair_product<CodesProductOf<Epilogue>>);
}

}  // namespace

const void* codes_store_kernel() { return kernel_of<Store<__nv_bfloat16>>(); }
const void* codes_activate_kernel() { return kernel_of<CodesActivate>(); }
const void* codes_activate_grad_kernel() { return kernel_of<CodesActivateGrad>(); }

}  // namespace sonicmoe::cuda::blackwell
