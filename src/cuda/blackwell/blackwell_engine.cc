#include "cuda/blackwell/blackwell_engine.h"

#include "cuda/blackwell/choices.h"
#include "cuda/blackwell/launch.h"
#include "cuda/blackwell/probe.h"
#include "cuda/blackwell/products.h"
#include "cuda/fp8/quantizers.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda {
namespace {

/// Sums into dX run beside weight gradients, because memory limits the sums and the tensor cores
/// limit the weight gradients.
BackwardOrder backward_order(const Problem& p, const BackwardArgs& args) {
  const Weights& g = args.grads;
  const bool has_weight_grads =
      g.gate.data != nullptr || g.up.data != nullptr || g.down.data != nullptr;
  BackwardOrder order{};
  order.input_grad_first = args.dx.data != nullptr && has_weight_grads &&
                           row_capacity(p) / p.experts >= blackwell::kSumBesideRows;
  return order;
}

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
    .probe = &blackwell::probe,
    .backward_order = &backward_order,
    .multiply_rows = &blackwell::multiply_rows,
    .multiply_depth = &blackwell::multiply_depth,
    .choices = blackwell::kChoices,
    .describe = &describe,
    .quantizers = &kQuantizers,
};

}  // namespace sonicmoe::cuda
