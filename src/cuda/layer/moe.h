// The layer on CUDA, in pieces that forward and backward share.
#pragma once

#include "cuda/device/device.h"
#include "cuda/hopper/roles.cuh"
#include "cuda/layer/backend.h"
#include "cuda/metadata/metadata.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::cuda {

/// Refuses what CUDA cannot serve although another backend could: dtypes, sizes that are no
/// multiple of 8, strides and pointers that TMA does not take.
void check_problem(const Problem& problem);
void check_rows(const char* name, const Tensor& rows);
void check_weight(const char* name, const Tensor& weight);
void check_weights(const Problem& problem, const Weights& weights);
void check_grads(const Problem& problem, const Weights& weights, const Weights& grads);

/// Scratch of moe_backward.
std::int64_t backward_scratch_bytes(const Problem& problem);

/// Room for the counters of products in drawn order.
inline constexpr std::int64_t kCounterBytes = 256;

/// Whether gate and up are the paired form: they alternate along n, up one element after gate.
bool is_paired(const Tensor& gate, const Tensor& up);

/// The tensor (E, 2n, d) whose even rows are the gate of the paired form.
Tensor pairs_of(const Tensor& gate);

ActivationScalars scalars_of(const Activation& activation);

/// The contiguous dimension of a weight view (E, rows, depth), as the operand of a product over
/// `depth`.
Major major_of(const Tensor& weight);

/// Loads of expert matrices (E, columns, depth) with `share` columns a box where they are K-major.
CUtensorMap weight_map(const Device& device, const Tensor& weight, const TileShape& shape);

/// Loads of grouped rows (C, width) or (C, parts, width).
CUtensorMap rows_map(const Device& device, const Tensor& rows, std::int32_t box_rows,
                     std::int32_t box_columns = 64);

/// Stores of rows (C, width) or (C, parts, width), any row stride, that end where an expert ends.
RaggedMap ragged_map(const Device& device, const Tensor& rows, std::int32_t box_columns = 64);

/// `by` at least 1 and below 2^31.
Divisor divisor(std::int64_t by);

/// Tiles of a row product over the metadata's list.
RowTiles::Params row_tiles(const Metadata& metadata, std::int64_t columns, int column_step,
                           std::int64_t depth, unsigned* counter);

/// Tiles of one matrix (E, M, N) an expert, its rows being K.
ExpertTiles::Params expert_tiles(const Metadata& metadata, const Tensor& matrices,
                                 const TileShape& shape);

/// Stores of matrices (E, M, N) that have one contiguous dimension, 64 by 64 elements a box.
CUtensorMap matrices_map(const Device& device, const Tensor& matrices);

/// Rows of an expert in the mean, as far as the host knows.
std::int64_t mean_rows(const Problem& problem);

/// Upper bound of the clusters' tiles, from what the host knows.
std::int64_t most_tiles(const Problem& problem, const RowTiles::Params& tiles);

inline Bias bias_of(const Tensor& bias) { return {bias.data, bias.stride[0], bias.stride[1]}; }

}  // namespace sonicmoe::cuda
