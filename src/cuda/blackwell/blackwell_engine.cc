#include "cuda/blackwell/blackwell_engine.h"

#include "cuda/blackwell/launch.h"
#include "cuda/blackwell/products.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda {
namespace {

/// The default order: the launches of this engine never overlap.
BackwardOrder backward_order(const Problem&, const BackwardArgs&) { return {}; }

std::vector<TileChoice> describe(const Problem&) {
  constexpr const char* kPair = "256x256 by a pair of CTAs";
  return {{"A", kPair},   {"Y", kPair},   {"dH", kPair},
          {"dW2", kPair}, {"dX~", kPair}, {"dW1", kPair}};
}

}  // namespace

const Engine kBlackwellEngine = {
    .name = "blackwell",
    .service = {.capabilities = {100, 103},
                .devices = "B200, B300",
                .dtypes = {DType::kBF16, DType::kF16},
                .multiple = 8},
    .score_columns = portable::kWarpColumns,
    .open = &blackwell::open,
    .backward_order = &backward_order,
    .multiply_rows = &blackwell::multiply_rows,
    .multiply_depth = &blackwell::multiply_depth,
    .describe = &describe,
};

}  // namespace sonicmoe::cuda
