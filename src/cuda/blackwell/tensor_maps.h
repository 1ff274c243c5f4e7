// How the instructions see tensors: tensor maps of rows, and types of operands.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/blackwell/params.h"
#include "cuda/math/layouts.h"
#include "cuda/tma/tensor_map.h"

namespace sonicmoe::cuda::blackwell {

/// Loads `rows_of_box` rows by 64 columns of part `part` of rows (C, width) or (C, parts, width).
/// With one row in a box it is a map of (column, row), for gather4, else of (column, row, 0). If
/// there are no rows, as on a rank without tokens, no kernel uses the map, and CUDA has none.
inline CUtensorMap rows_map(EncodeTensorMap encode, const Tensor& rows, std::int32_t part,
                            std::int32_t rows_of_box) {
  if (rows.shape[0] == 0) return {};
  const MapDim columns{rows.shape[rows.rank - 1], 1, kBoxColumns};
  const MapDim lines{rows.shape[0], rows.stride[0], rows_of_box};
  const std::int64_t skip = rows.rank == 3 ? part * rows.stride[1] * kElementBytes : 0;
  const void* base = static_cast<const std::uint8_t*>(rows.data) + skip;
  if (rows_of_box == 1) return encode_map(encode, rows.dtype, base, {columns, lines});
  return encode_map(encode, rows.dtype, base, {columns, lines, {1, 0, 1}});
}

/// Loads boxes of matrices (E, columns, depth).
inline CUtensorMap columns_map(EncodeTensorMap encode, const Tensor& matrices) {
  const int fast = major_of(matrices) == Major::kK ? 2 : 1;
  const int slow = 3 - fast;
  return encode_map(encode, matrices.dtype, matrices.data,
                    {{matrices.shape[fast], 1, 64},
                     {matrices.shape[slow], matrices.stride[slow], 64},
                     {matrices.shape[0], matrices.stride[0], 1}});
}

inline std::uint32_t types_of(DType dtype) { return dtype == DType::kBF16 ? kBrainTypes : 0; }

}  // namespace sonicmoe::cuda::blackwell
