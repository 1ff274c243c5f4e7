#include "cuda/portable/portable_engine.h"

#include <string>

#include "cuda/portable/choices.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/products.h"

namespace sonicmoe::cuda {
namespace {

/// The default order: the launches of this engine never overlap.
BackwardOrder backward_order(const Problem&, const BackwardArgs&) { return {}; }

std::vector<TileChoice> describe(const Problem& p) {
  const std::string tile = "128x256";
  const std::string grad_tile = portable::is_narrow(p.width) ? "128x128 or " + tile : tile;
  return {{"A", tile}, {"Y", tile}, {"dH", grad_tile}, {"dW2", tile}, {"dX~", tile}, {"dW1", tile}};
}

}  // namespace

const Engine kPortableEngine = {
    .name = "portable",
    .service = {.capabilities = {80, 129},
                .devices = "every NVIDIA GPU since Ampere",
                .dtypes = {DType::kBF16, DType::kF16},
                .multiple = 8},
    .score_columns = portable::kWarpColumns,
    .open = &portable::open,
    .backward_order = &backward_order,
    .multiply_rows = &portable::multiply_rows,
    .multiply_depth = &portable::multiply_depth,
    .choices = portable::kChoices,
    .describe = &describe,
    .multiply_packed_rows = &portable::multiply_packed_rows,
};

}  // namespace sonicmoe::cuda
