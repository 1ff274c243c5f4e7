// The primitive beneath the layer: one GEMM per expert over rows grouped by expert, with the gather
// fused into the loads.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe {

/// Varlen-M: D[p] = A[row(p)] B_e^T for offsets[e] <= p < offsets[e+1], row(p) = gather ? gather[p]
/// : p. Rows at or past offsets[E] of D are not written.
struct GroupedGemm {
  Tensor a{};        ///< (rows, k)
  Tensor b{};        ///< (E, n, k), any strides
  Tensor d{};        ///< (R, n)
  Tensor offsets{};  ///< (E+1) i64, ascending
  Tensor gather{};   ///< (R) i32, optional
};
SONICMOE_API void grouped_gemm(const GroupedGemm& args, const Exec& exec = {});

/// Varlen-K: D_e = sum over p of expert e of A[row(p)]^T B[p]; zero for experts without rows.
struct GroupedGemmK {
  Tensor a{};        ///< (rows, m)
  Tensor b{};        ///< (R, n)
  Tensor d{};        ///< (E, m, n), any strides
  Tensor offsets{};  ///< (E+1) i64, ascending
  Tensor gather{};   ///< (R) i32, optional: rows of a
};
SONICMOE_API void grouped_gemm_k(const GroupedGemmK& args, const Exec& exec = {});

}  // namespace sonicmoe
