#include "cuda/tma/tensor_map.h"

#include <string>

#include "cuda/device/device.h"

namespace sonicmoe::cuda {
namespace {

constexpr std::int64_t kElementBytes = 2;

}  // namespace

EncodeTensorMap find_encode_tensor_map() {
  return reinterpret_cast<EncodeTensorMap>(driver_function("cuTensorMapEncodeTiled"));
}

std::int64_t map_stride(std::int64_t size, std::int64_t stride) { return size == 1 ? 8 : stride; }

CUtensorMap encode_map(EncodeTensorMap encode, const MapFormat& format, const void* base,
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
    const std::int64_t stride = map_stride(dim.size, dim.stride);
    if (rank > 0) strides[rank - 1] = static_cast<cuuint64_t>(stride * format.bytes);
    rank++;
  }
  // The result is encoded here and then copied: the driver asks for an address that is a multiple
  // of 64, and GCC 12 aligns the caller's temporaries to 16 bytes only.
  struct {
    CUtensorMap map;
  } encoded;
  const CUresult result =
      encode(&encoded.map, format.type, rank, const_cast<void*>(base), sizes, strides, boxes, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, format.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Error(Status::kInternal, "the driver refused a tensor map (code " +
                                       std::to_string(static_cast<int>(result)) + ").");
  }
  return encoded.map;
}

CUtensorMap encode_map(EncodeTensorMap encode, DType dtype, const void* base,
                       std::initializer_list<MapDim> dims) {
  const bool narrow = dims.begin()->box * kElementBytes <= 64;
  return encode_map(
      encode,
      {dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
       kElementBytes, narrow ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B},
      base, dims);
}

}  // namespace sonicmoe::cuda
