// Refuses dtypes, sizes, strides and pointers that CUDA cannot serve, because tensor maps and
// 16-byte copies cannot address them. Each refusal is an Error(kUnsupported).
#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

/// Checks sizes and dtype against the engine's Service.
void check_problem(const Problem& problem, const Engine& engine);

/// Checks dtype and extents of the grouped GEMM's operands against the engine's Service.
void check_product(const char* name, DType dtype, std::initializer_list<std::int64_t> extents,
                   const Engine& engine);

/// Why `engine` cannot serve a problem, empty if it can.
std::string refusal(const Problem& problem, const Engine& engine);

/// At most 1024 experts: the metadata kernels use one thread of a block for each expert.
void check_experts(const char* name, std::int64_t experts);

/// At most 2^31 - 2^18 rows: kernels compute 32-bit indices of rows past the last one, by up to one
/// record (kRecordRows) for each expert and each CTA.
void check_row_count(const char* name, std::int64_t rows);

/// Rows (R, width): 16-byte aligned, last stride 1, row stride a multiple of 8 below 2^30.
void check_rows(const char* name, const Tensor& rows);

/// Matrices (E, a, b): 16-byte aligned, one of a and b contiguous, other strides multiples of 8.
void check_matrices(const char* name, const Tensor& matrices);

void check_weights(const Problem& problem, const Weights& weights);
/// As check_matrices() for a gradient, which may be absent, and in fp32 of any strides.
void check_grad(const char* name, const Tensor& grad);
void check_grads(const Problem& problem, const Weights& weights, const Weights& grads);

}  // namespace sonicmoe::cuda
