// Tensor maps: how TMA reads and writes the operands of products.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/device/device.h"
#include "cuda/hopper/params.h"
#include "cuda/layer/product.h"

namespace sonicmoe::cuda {

/// Loads of expert matrices (E, columns, depth). A box is half of a tile's columns if the matrices
/// are K-major, a group of 64 columns if they are MN-major.
CUtensorMap weight_map(const Device& device, const Tensor& weight, const TileShape& shape);

/// As weight_map() of K-major matrices whose experts lie one after the other, at equal distances
/// that are multiples of 32 rows, in boxes of ColumnOrder::kByLane (OperandBMaps).
CUtensorMap weight_map_by_lane(const Device& device, const Tensor& weight, const TileShape& shape);

/// Loads of rows (C, width) or (C, G, width).
CUtensorMap rows_map(const Device& device, const Tensor& rows, std::int32_t box_rows,
                     std::int32_t box_columns = 64);

/// Stores of rows (C, width) or (C, G, width), any row stride, that end where an expert ends.
RaggedMap ragged_map(const Device& device, const Tensor& rows, std::int32_t box_columns = 64);

/// Loads of row scales (blocks, rows rounded up to 4) in fp32: a box is `box_rows` of one block. A
/// box begins at a multiple of 4 rows.
CUtensorMap scales_map(const Device& device, const float* scales, std::int64_t blocks,
                       std::int64_t rows, std::int32_t box_rows);

/// Stores of matrices (E, M, N) that have one contiguous dimension, 64 by 64 elements a box.
CUtensorMap matrices_map(const Device& device, const Tensor& matrices);

}  // namespace sonicmoe::cuda
