// The loops of route_simd.h for AVX-512.
#include "core/selection_key.h"
#include "cpu/route_simd.h"

namespace sonicmoe::cpu {
namespace {
#include "cpu/route_simd_body.h"
}  // namespace

extern const RouteSimd kRouteSimdAvx512 = {load_row,
                                           order_row,
                                           softmax_row,
                                           sigmoid_row,
                                           sqrt_softplus_row,
                                           sqrt_softplus_parts,
                                           top_row<std::uint32_t>,
                                           top_row<std::uint64_t>};

}  // namespace sonicmoe::cpu
