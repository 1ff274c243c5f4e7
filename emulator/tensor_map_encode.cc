// cuTensorMapEncodeTiled: writes the emulator's TensorMap where the driver writes its own format.
#include <cuda.h>

#include <cstring>

#include "tensor_map.h"

namespace sonicmoe::emulator {
namespace {

constexpr cuuint32_t kMostRank = 5;
constexpr cuuint32_t kMostBox = 256;
constexpr cuuint64_t kAlignment = 16;  // bytes of bases, strides and rows of boxes
constexpr cuuint64_t kMapAlignment = 64;
constexpr cuuint64_t kMostStride = cuuint64_t{1} << 40;
constexpr cuuint64_t kMostSize = (cuuint64_t{1} << 32) - 1;

/// 0 where the type is not emulated.
std::uint8_t bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
      return 8;
    default:
      return 0;
  }
}

/// False where the swizzle is not emulated.
bool set_swizzle(CUtensorMapSwizzle swizzle, TensorMap* map) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE:
      map->swizzle_bytes = 0;
      return true;
    case CU_TENSOR_MAP_SWIZZLE_32B:
      map->swizzle_bytes = 32;
      return true;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      map->swizzle_bytes = 64;
      return true;
    case CU_TENSOR_MAP_SWIZZLE_128B:
      map->swizzle_bytes = 128;
      return true;
    default:
      return false;
  }
}

bool set_sizes(const cuuint64_t* sizes, const cuuint32_t* boxes, TensorMap* map) {
  for (int d = 0; d < map->rank; ++d) {
    if (sizes[d] == 0 || sizes[d] > kMostSize || boxes[d] == 0 || boxes[d] > kMostBox) return false;
    map->sizes[d] = static_cast<std::uint32_t>(sizes[d]);
    map->boxes[d] = static_cast<std::uint16_t>(boxes[d]);
  }
  return true;
}

bool set_strides(const cuuint64_t* strides, TensorMap* map) {
  for (int d = 0; d + 1 < map->rank; ++d) {
    if (strides[d] % kAlignment != 0 || strides[d] >= kMostStride) return false;
    map->strides[d] = strides[d];
  }
  return true;
}

}  // namespace
}  // namespace sonicmoe::emulator

/// Not emulated: element strides other than 1, interleaving, NaN for what is outside of the tensor,
/// and rows of a box that are shorter than their swizzle.
extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap* to, CUtensorMapDataType type,
                                           cuuint32_t rank, void* base, const cuuint64_t* sizes,
                                           const cuuint64_t* strides, const cuuint32_t* boxes,
                                           const cuuint32_t* steps,
                                           CUtensorMapInterleave interleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                           CUtensorMapFloatOOBfill outside) {
  using namespace sonicmoe::emulator;
  static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
  if (to == nullptr || sizes == nullptr || boxes == nullptr || steps == nullptr || rank == 0 ||
      rank > kMostRank || (rank > 1 && strides == nullptr)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  TensorMap map;
  map.rank = static_cast<std::uint8_t>(rank);
  map.base = reinterpret_cast<std::uint64_t>(base);
  map.element_bytes = bytes_of(type);
  if (map.element_bytes == 0 || !set_swizzle(swizzle, &map) ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || outside != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  for (cuuint32_t d = 0; d < rank; ++d) {
    if (steps[d] == 0) return CUDA_ERROR_INVALID_VALUE;
    if (steps[d] != 1) return CUDA_ERROR_NOT_SUPPORTED;
  }
  const cuuint64_t row_bytes = cuuint64_t{boxes[0]} * map.element_bytes;
  if (reinterpret_cast<std::uintptr_t>(to) % kMapAlignment != 0 || map.base % kAlignment != 0 ||
      !set_sizes(sizes, boxes, &map) || !set_strides(strides, &map) ||
      row_bytes % kAlignment != 0 || (map.swizzle_bytes != 0 && row_bytes > map.swizzle_bytes)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (row_bytes < map.swizzle_bytes) return CUDA_ERROR_NOT_SUPPORTED;
  std::memset(to, 0, sizeof *to);
  std::memcpy(to, &map, sizeof map);
  return CUDA_SUCCESS;
}
