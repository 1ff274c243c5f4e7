#include "cuda/hopper/tensor_maps.h"

#include <initializer_list>
#include <string>

#include "cuda/hopper/launch.h"

namespace sonicmoe::cuda {
namespace {

/// One dimension of a tensor map. Lists begin with the fastest dimension, whose stride is 1.
struct MapDim {
  std::int64_t size;
  std::int64_t stride;  // elements
  std::int32_t box;
};

struct MapFormat {
  CUtensorMapDataType type;
  std::int64_t bytes;  ///< of an element
  CUtensorMapSwizzle swizzle;
};

/// The stride of a dimension. The stride of a dimension of size 1 is never used, so the caller's
/// view may have any number there. But the driver refuses a stride that is no multiple of 16 bytes.
std::int64_t stride_of(std::int64_t size, std::int64_t stride) { return size == 1 ? 8 : stride; }

CUtensorMap encode_map(const Device& device, const MapFormat& format, const void* base,
                       std::initializer_list<MapDim> dims) {
  constexpr int kMaxRank = 5;
  cuuint64_t sizes[kMaxRank];
  cuuint64_t strides[kMaxRank];
  cuuint32_t boxes[kMaxRank];
  cuuint32_t steps[kMaxRank];
  int rank = 0;
  for (const MapDim& dim : dims) {
    sizes[rank] = static_cast<cuuint64_t>(dim.size);
    boxes[rank] = static_cast<cuuint32_t>(dim.box);
    steps[rank] = 1;
    const std::int64_t stride = stride_of(dim.size, dim.stride);
    if (rank > 0) strides[rank - 1] = static_cast<cuuint64_t>(stride * format.bytes);
    rank++;
  }
  // The result is encoded here and then copied: the driver asks for an address that is a multiple
  // of 64, and GCC 12 aligns the caller's temporaries to 16 bytes only.
  struct {
    CUtensorMap map;
  } encoded;
  const CUresult result = hopper_state(device).encode(
      &encoded.map, format.type, rank, const_cast<void*>(base), sizes, strides, boxes, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, format.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(Status::kInternal, "the driver refused a tensor map (code " +
                                       std::to_string(static_cast<int>(result)) + ").");
  }
  return encoded.map;
}

/// A map of 16-bit elements. The swizzle of boxes in shared memory is 64 bytes if a row of a box
/// has at most 64 bytes, else 128 bytes.
CUtensorMap encode_map(const Device& device, DType dtype, const void* base,
                       std::initializer_list<MapDim> dims) {
  const bool narrow = dims.begin()->box * kElementBytes <= 64;
  return encode_map(
      device,
      {dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
       kElementBytes, narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B},
      base, dims);
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
  const std::int64_t stride = stride_of(capacity, rows.stride[0]);
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
