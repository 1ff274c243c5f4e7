// Loops over the logits of a row, compiled once for each instruction set. All give the same bits.
#pragma once

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe::cpu {

/// Keys in a block of top32 and top64.
inline constexpr std::int64_t kTopBlock = 16;

/// Buffers have at least n elements and do not overlap. core/selection_key.h defines the values.
struct RouteSimd {
  /// Reads contiguous logits of any dtype but fp64. NaN becomes -inf, +inf the largest finite
  /// value.
  void (*load)(const void* logits, DType dtype, std::int64_t n, float* x);
  void (*order)(const float* v, std::int64_t n, std::uint32_t* keys);
  /// p = softmax(x). tmp has 2 * n floats. Returns the sum of e^(x - *top); *top is the maximum.
  float (*softmax)(const float* x, std::int64_t n, float* p, float* tmp, float* top);
  void (*sigmoid)(const float* x, std::int64_t n, float* s);
  void (*sqrt_softplus)(const float* x, std::int64_t n, float* s);
  /// s = sqrt_softplus_part32(x, top), slope = sqrt_softplus_slope32(x). `top` is finite.
  void (*sqrt_softplus_parts)(const float* x, float top, std::int64_t n, float* s, float* slope);
  /// The indices of the k largest keys above `floor`: largest first, the lower index first among
  /// equal keys, -1 where no key is left. `keys` has room for n rounded up to a multiple of
  /// kTopBlock, and is overwritten. `block_max` has room for n / kTopBlock + 1.
  void (*top32)(std::uint32_t* keys, std::int64_t n, std::int64_t k, std::uint32_t floor,
                std::uint32_t* block_max, std::int32_t* ids);
  void (*top64)(std::uint64_t* keys, std::int64_t n, std::int64_t k, std::uint64_t floor,
                std::uint64_t* block_max, std::int32_t* ids);
};

extern const RouteSimd kRouteSimdPortable;
extern const RouteSimd kRouteSimdAvx2;
extern const RouteSimd kRouteSimdAvx512;

/// The table of the widest instruction set that this processor runs.
const RouteSimd& route_simd();

}  // namespace sonicmoe::cpu
