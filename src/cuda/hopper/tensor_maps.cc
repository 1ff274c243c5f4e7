#include "cuda/hopper/tensor_maps.h"

#include <initializer_list>

#include "cuda/hopper/launch.h"
#include "cuda/tma/tensor_map.h"

namespace sonicmoe::cuda {
namespace {

CUtensorMap encode_map(const Device& device, const MapFormat& format, const void* base,
                       std::initializer_list<MapDim> dims) {
  return encode_map(hopper_state(device).encode, format, base, dims);
}
CUtensorMap encode_map(const Device& device, DType dtype, const void* base,
                       std::initializer_list<MapDim> dims) {
  return encode_map(hopper_state(device).encode, dtype, base, dims);
}

/// Dimensions of rows (C, width), which have one part, or (C, parts, width).
struct RowDims {
  explicit RowDims(const Tensor& rows)
      : width(rows.shape[rows.rank - 1]),
        parts{rows.rank == 3 ? rows.shape[1] : 1, rows.rank == 3 ? rows.stride[1] : width, 1} {}
  std::int64_t width;
  MapDim parts;
};

}  // namespace

CUtensorMap weight_map(const Device& device, const Tensor& weight, const TileShape& shape) {
  const MapDim experts{weight.shape[0], weight.stride[0], 1};
  if (major_of(weight) == Major::kK) {
    return encode_map(
        device, weight.dtype, weight.data,
        {{weight.shape[2], 1, kDepth}, {weight.shape[1], weight.stride[1], shape.n / 2}, experts});
  }
  return encode_map(device, weight.dtype, weight.data,
                    {{weight.shape[1], 1, 64},
                     {weight.shape[2], weight.stride[2], mn_box_depth(shape)},
                     experts});
}

CUtensorMap weight_map_by_lane(const Device& device, const Tensor& weight, const TileShape& shape) {
  const std::int64_t row = weight.stride[1];
  const std::int64_t expert_rows = weight.stride[0] / row;
  const std::int64_t rows = (weight.shape[0] - 1) * expert_rows + weight.shape[1];
  return encode_map(device, weight.dtype, weight.data,
                    {{weight.shape[2], 1, kDepth},
                     {2, row, 2},
                     {4, 8 * row, 4},
                     {4, 2 * row, 4},
                     {rows / 32, 32 * row, shape.n / 64}});
}

CUtensorMap rows_map(const Device& device, const Tensor& rows, std::int32_t box_rows,
                     std::int32_t box_columns) {
  const RowDims dims(rows);
  return encode_map(
      device, rows.dtype, rows.data,
      {{dims.width, 1, box_columns}, dims.parts, {rows.shape[0], rows.stride[0], box_rows}});
}

RaggedMap ragged_map(const Device& device, const Tensor& rows, std::int32_t box_columns) {
  const RowDims dims(rows);
  const std::int64_t capacity = rows.shape[0];
  const std::int64_t stride = map_stride(capacity, rows.stride[0]);
  // The base may lie before the allocation. The kernels store only boxes that begin inside the
  // tensor (RaggedMap).
  const std::uintptr_t base = reinterpret_cast<std::uintptr_t>(rows.data) -
                              static_cast<std::uintptr_t>(capacity * stride * kElementBytes);
  return {encode_map(device, rows.dtype, reinterpret_cast<const void*>(base),
                     {{dims.width, 1, box_columns},
                      dims.parts,
                      {capacity, stride, 64},
                      {capacity + 1, stride, 1}}),
          static_cast<std::int32_t>(capacity)};
}

CUtensorMap scales_map(const Device& device, const float* scales, std::int64_t blocks,
                       std::int64_t rows, std::int32_t box_rows) {
  const std::int64_t stride = (rows + 3) / 4 * 4;
  return encode_map(device,
                    {CU_TENSOR_MAP_DATA_TYPE_FLOAT32, sizeof(float), CU_TENSOR_MAP_SWIZZLE_NONE},
                    scales, {{stride, 1, box_rows}, {1, stride, 1}, {blocks, stride, 1}});
}

CUtensorMap matrices_map(const Device& device, const Tensor& t) {
  const int fast = major_of(t) == Major::kK ? 2 : 1;
  const int slow = 3 - fast;
  return encode_map(
      device, t.dtype, t.data,
      {{t.shape[fast], 1, 64}, {t.shape[slow], t.stride[slow], 64}, {t.shape[0], t.stride[0], 1}});
}

}  // namespace sonicmoe::cuda
