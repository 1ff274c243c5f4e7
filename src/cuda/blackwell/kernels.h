// The compiled kernels. Host only.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe::cuda::blackwell {

/// Row products with the epilogue Store, Activate or ActivateGrad, of bf16 or fp16.
const void* store_kernel(DType dtype);
const void* activate_kernel(DType dtype);
const void* activate_grad_kernel(DType dtype);

/// Row products of codes, whose results are bf16 or codes.
const void* codes_store_kernel();
const void* codes_activate_kernel();
const void* codes_activate_grad_kernel();

/// Depth products of bf16 or fp16.
const void* store_expert_kernel(DType dtype);

}  // namespace sonicmoe::cuda::blackwell
