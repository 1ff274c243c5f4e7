// What CUDA refuses although another backend could serve it: types, sizes, strides and pointers
// that neither tensor maps nor 16-byte copies can take. Each refusal is an Error(kUnsupported).
#pragma once

#include "cuda/layer/engine.h"

namespace sonicmoe::cuda {

/// Sizes and types, by what the engine declares.
void check_problem(const Problem& problem, const Engine& engine);

/// Dtype and extents of the grouped GEMM's operands, likewise.
void check_product(const char* name, DType dtype, std::initializer_list<std::int64_t> extents,
                   const Engine& engine);

/// Why `engine` cannot serve a problem, empty if it can.
std::string refusal(const Problem& problem, const Engine& engine);

/// At most so many experts: the lists of rows are made by blocks of as many threads.
void check_experts(const char* name, std::int64_t experts);

/// Rows (R, width): 16-byte aligned, last stride 1, row stride a multiple of 8 below 2^30.
void check_rows(const char* name, const Tensor& rows);

/// Matrices (E, a, b): 16-byte aligned, one of a and b contiguous, other strides multiples of 8.
void check_matrices(const char* name, const Tensor& matrices);

void check_weights(const Problem& problem, const Weights& weights);
void check_grads(const Problem& problem, const Weights& weights, const Weights& grads);

}  // namespace sonicmoe::cuda
