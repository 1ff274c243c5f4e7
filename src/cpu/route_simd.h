// Row loops of routing, compiled once per instruction set. The bits do not depend on which one
// runs.
#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe::cpu {

/// n <= buffer sizes; buffers do not overlap. See core/selection_key.h for the values.
struct RouteSimd {
  /// Contiguous logits of a dtype (not fp64) -> clean fp32 values.
  void (*load)(const void* logits, DType dtype, std::int64_t n, float* x);
  void (*order)(const float* v, std::int64_t n, std::uint32_t* keys);
  /// p from x; tmp holds 2 * n floats. Returns the sum of exponentials and, in *top, the maximum.
  float (*softmax)(const float* x, std::int64_t n, float* p, float* tmp, float* top);
  void (*sigmoid)(const float* x, std::int64_t n, float* s);
  /// Writes the indices of keys above the floor in ascending order, returns how many.
  std::int64_t (*above)(const std::uint32_t* keys, std::int64_t n, std::uint32_t floor,
                        std::int32_t* indices);
};

extern const RouteSimd kRouteSimdPortable;
extern const RouteSimd kRouteSimdAvx2;
extern const RouteSimd kRouteSimdAvx512;

/// The widest table that this processor runs.
const RouteSimd& route_simd();

}  // namespace sonicmoe::cpu
