// Grouped GEMM: one GEMM per expert over rows grouped by expert. Rows can be gathered by index
// while they are loaded.
//
// Offsets and row indices are values on the device, so they are never refused. Every value has a
// meaning, which is the same on every backend:
// - Each offset is clamped to [0, R]. Expert e has the rows from offsets[e] up to offsets[e+1], and
//   none if offsets[e+1] is smaller.
// - Each row index is clamped to the rows of a. If a has no rows, no expert has rows.
// - If offsets decrease, the ranges of two experts may overlap. grouped_gemm then writes
//   unspecified values to the rows of all ranges, and nothing elsewhere. grouped_gemm_k is not
//   affected, because it only reads rows.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe {

/// Varlen-M: D[p] = A[row(p)] B_e^T for every row p of expert e, row(p) = gather ? gather[p] : p.
/// Rows of D that belong to no expert are not written. d must not share memory with another
/// argument.
struct GroupedGemm {
  Tensor a{};        ///< (rows, k)
  Tensor b{};        ///< (E, n, k), any strides
  Tensor d{};        ///< (R, n)
  Tensor offsets{};  ///< (E+1) i64, ascending
  Tensor gather{};   ///< (R) i32, optional: rows of a; without entries it needs no memory
  Buffer scratch{};  ///< grouped_gemm_scratch_bytes(R, E)
};
SONICMOE_API void grouped_gemm(const GroupedGemm& args, const Exec& exec = {});

/// Varlen-K: D_e = sum over the rows p of expert e of A[row(p)]^T B[p]; zero for experts without
/// rows. d must not share memory with another argument.
struct GroupedGemmK {
  Tensor a{};        ///< (rows, m)
  Tensor b{};        ///< (R, n)
  Tensor d{};        ///< (E, m, n), any strides
  Tensor offsets{};  ///< (E+1) i64, ascending
  Tensor gather{};   ///< (R) i32, optional: rows of a; without entries it needs no memory
  Buffer scratch{};  ///< grouped_gemm_scratch_bytes(R, E)
};
SONICMOE_API void grouped_gemm_k(const GroupedGemmK& args, const Exec& exec = {});

/// Bytes of scratch that either function needs for R grouped rows of E experts; 0 on the CPU.
///
/// On CUDA tensors must be bf16 or fp16, E <= 1024, and k, m and n multiples of 8; docs/cpp.md has
/// the rules for a, b and d.
SONICMOE_API std::int64_t grouped_gemm_scratch_bytes(std::int64_t rows, std::int64_t experts,
                                                     const Exec& exec = {});

}  // namespace sonicmoe
