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
  Tensor gather{};   ///< (R) i32, optional: rows of a
  Buffer scratch{};  ///< grouped_gemm_scratch_bytes(R, E)
};
SONICMOE_API void grouped_gemm(const GroupedGemm& args, const Exec& exec = {});

/// Varlen-K: D_e = sum over p of expert e of A[row(p)]^T B[p]; zero for experts without rows.
struct GroupedGemmK {
  Tensor a{};        ///< (rows, m)
  Tensor b{};        ///< (R, n)
  Tensor d{};        ///< (E, m, n), any strides
  Tensor offsets{};  ///< (E+1) i64, ascending
  Tensor gather{};   ///< (R) i32, optional: rows of a
  Buffer scratch{};  ///< grouped_gemm_scratch_bytes(R, E)
};
SONICMOE_API void grouped_gemm_k(const GroupedGemmK& args, const Exec& exec = {});

/// Bytes of scratch that either form needs for R grouped rows of E experts; 0 on the CPU. On CUDA
/// tensors are bf16 or fp16, E <= 1024, k, m and n multiples of 8, and a, b and d meet the rules of
/// docs/engine.md for rows and expert matrices; offsets past R and indices past the rows of a are
/// clamped.
SONICMOE_API std::int64_t grouped_gemm_scratch_bytes(std::int64_t rows, std::int64_t experts,
                                                     const Exec& exec = {});

}  // namespace sonicmoe
