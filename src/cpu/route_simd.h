// Row loops of routing, compiled once per instruction set. The bits do not depend on which one
// runs.
#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe::cpu {

/// Keys that top32 and top64 look at together.
inline constexpr std::int64_t kTopBlock = 16;

/// n <= buffer sizes; buffers do not overlap. See core/selection_key.h for the values.
struct RouteSimd {
  /// Contiguous logits of a dtype (not fp64) -> clean fp32 values.
  void (*load)(const void* logits, DType dtype, std::int64_t n, float* x);
  void (*order)(const float* v, std::int64_t n, std::uint32_t* keys);
  /// p from x; tmp holds 2 * n floats. Returns the sum of exponentials and, in *top, the maximum.
  float (*softmax)(const float* x, std::int64_t n, float* p, float* tmp, float* top);
  void (*sigmoid)(const float* x, std::int64_t n, float* s);
  /// The k largest keys above the floor, largest first and lower index first on ties, -1 when
  /// there are no more. keys has room for n rounded up to kTopBlock, and is destroyed; block_max
  /// has room for n / kTopBlock + 1.
  void (*top32)(std::uint32_t* keys, std::int64_t n, std::int64_t k, std::uint32_t floor,
                std::uint32_t* block_max, std::int32_t* ids);
  void (*top64)(std::uint64_t* keys, std::int64_t n, std::int64_t k, std::uint64_t floor,
                std::uint64_t* block_max, std::int32_t* ids);
};

extern const RouteSimd kRouteSimdPortable;
extern const RouteSimd kRouteSimdAvx2;
extern const RouteSimd kRouteSimdAvx512;

/// The widest table that this processor runs.
const RouteSimd& route_simd();

}  // namespace sonicmoe::cpu
