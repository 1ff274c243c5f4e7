// Encodes tensor maps, by which TMA reads and writes boxes of a tensor.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <initializer_list>

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// cuTensorMapEncodeTiled of the driver.
using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                     const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                     const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                     CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/// Refuses a driver without tensor maps.
EncodeTensorMap find_encode_tensor_map();

/// One dimension of a tensor map. Lists begin with the fastest dimension, whose stride is 1.
struct MapDim {
  std::int64_t size;
  std::int64_t stride;  ///< elements
  std::int32_t box;
};

struct MapFormat {
  CUtensorMapDataType type;
  std::int64_t bytes;  ///< of an element
  CUtensorMapSwizzle swizzle;
};

/// The stride of a dimension. The stride of a dimension of size 1 is never used, so the caller's
/// view may have any number there. But the driver refuses a stride that is no multiple of 16 bytes.
std::int64_t map_stride(std::int64_t size, std::int64_t stride);

/// A map of at most five dimensions. Elements outside of the tensor are loaded as zeros.
CUtensorMap encode_map(EncodeTensorMap encode, const MapFormat& format, const void* base,
                       std::initializer_list<MapDim> dims);

/// A map of 16-bit elements. The swizzle of boxes in shared memory is 64 bytes if a row of a box
/// has at most 64 bytes, else 128 bytes.
CUtensorMap encode_map(EncodeTensorMap encode, DType dtype, const void* base,
                       std::initializer_list<MapDim> dims);

}  // namespace sonicmoe::cuda
