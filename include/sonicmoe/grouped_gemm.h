// Grouped GEMM: one GEMM per expert over rows grouped by expert. Rows can be gathered by index
// while they are loaded.
//
// a, b and d have one floating-point dtype, on CUDA bf16 or fp16. docs/cpp.md has the other rules
// on CUDA (sizes, addresses, strides); a call that breaks them throws Status::kUnsupported. Wrong
// shapes, and a d that shares memory with another argument, throw Status::kInvalidArgument.
//
// The host does not check offsets and row indices, because on CUDA they are values on the device.
// Every value has a meaning, which is the same on every backend:
// - Each offset is clamped to [0, R]. Expert e has the rows from offsets[e] up to offsets[e+1], and
//   none if offsets[e+1] is smaller.
// - Each row index is clamped to the rows of a. If a has no rows, no expert has rows.
// - If offsets decrease, the ranges of two experts may overlap. grouped_gemm then writes
//   unspecified values to the rows of all ranges, and nothing elsewhere. grouped_gemm_k is not
//   affected, because it only reads rows.
#pragma once

#include "sonicmoe/types.h"

namespace sonicmoe {

/// Arguments of grouped_gemm(), a grouped GEMM whose M varies: D[p] = A[row(p)] B_e^T for every row
/// p of expert e, where row(p) = gather[p], or p without gather. Rows of D that belong to no expert
/// are not written.
struct GroupedGemm {
  Tensor a{};        ///< (rows, k); without gather rows = R
  Tensor b{};        ///< (E, n, k), on the CPU any strides
  Tensor d{};        ///< (R, n)
  Tensor offsets{};  ///< (E+1) i64, ascending
  Tensor gather{};   ///< (R) i32, optional: rows of a; if R = 0, data may be null
  Buffer scratch{};  ///< grouped_gemm_scratch_bytes(R, E)
};
SONICMOE_API void grouped_gemm(const GroupedGemm& args, const Exec& exec = {});

/// Arguments of grouped_gemm_k(), a grouped GEMM whose K varies: D_e = sum over the rows p of
/// expert e of A[row(p)]^T B[p], with row(p) as above. D_e is 0 for experts without rows.
struct GroupedGemmK {
  Tensor a{};        ///< (rows, m); without gather rows = R
  Tensor b{};        ///< (R, n)
  Tensor d{};        ///< (E, m, n), on the CPU any strides
  Tensor offsets{};  ///< (E+1) i64, ascending
  Tensor gather{};   ///< (R) i32, optional: rows of a; if R = 0, data may be null
  Buffer scratch{};  ///< grouped_gemm_scratch_bytes(R, E)
};
SONICMOE_API void grouped_gemm_k(const GroupedGemmK& args, const Exec& exec = {});

/// Bytes of scratch that grouped_gemm() or grouped_gemm_k() needs. `rows` is R, the number of
/// grouped rows, and `experts` is E. 0 on the CPU.
SONICMOE_API std::int64_t grouped_gemm_scratch_bytes(std::int64_t rows, std::int64_t experts,
                                                     const Exec& exec = {});

}  // namespace sonicmoe
