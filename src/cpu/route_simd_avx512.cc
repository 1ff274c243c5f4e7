// Row loops of routing for AVX512 processors.
#include "core/selection_key.h"
#include "cpu/route_simd.h"

namespace sonicmoe::cpu {
namespace {
#include "cpu/route_simd_body.h"
}  // namespace

extern const RouteSimd kRouteSimdAvx512 = {load_row, order_row, softmax_row, sigmoid_row,
                                           above_row};

}  // namespace sonicmoe::cpu
