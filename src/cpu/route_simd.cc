// The loops of route_simd.h for any processor, and the choice of the table.
#include "cpu/route_simd.h"

#include "core/selection_key.h"

namespace sonicmoe::cpu {
namespace {
#include "cpu/route_simd_body.h"
}  // namespace

extern const RouteSimd kRouteSimdPortable = {load_row,
                                             order_row,
                                             softmax_row,
                                             sigmoid_row,
                                             sqrt_softplus_row,
                                             sqrt_softplus_parts,
                                             top_row<std::uint32_t>,
                                             top_row<std::uint64_t>};

const RouteSimd& route_simd() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return kRouteSimdAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return kRouteSimdAvx2;
  }
  return kRouteSimdPortable;
}

}  // namespace sonicmoe::cpu
