// The compiled kernels. Host only.
#pragma once

#include "cuda/math/layouts.h"
#include "cuda/portable/shape.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda::portable {

/// Selects one of the kernels with the same epilogue.
struct Variant {
  DType dtype;      ///< kBF16 or kF16
  TileShape shape;  ///< narrow only for ActivateGrad
};

/// For depth products: the tensor whose rows are gathered.
enum class GatheredSide { kLeft, kRight };

/// The codes of packed weights: PackedCodes or Fp8Codes.
enum class Codes { kDigits, kFp8 };

/// Row products, by the contiguous dimension of the weights: with the epilogue Store, Activate or
/// ActivateGrad.
const void* store_kernel(const Variant& variant, Major major);
const void* activate_kernel(const Variant& variant, Major major);
const void* activate_grad_kernel(const Variant& variant, Major major);
/// The same with packed weights, in bf16 and kPackedShape. Activate has K-major weights only,
/// ActivateGrad others only.
const void* packed_store_kernel(Codes codes, Major major);
const void* packed_activate_kernel(Codes codes);
const void* packed_activate_grad_kernel(Codes codes);
/// Depth products.
const void* store_expert_kernel(const Variant& variant, GatheredSide side);

}  // namespace sonicmoe::cuda::portable
