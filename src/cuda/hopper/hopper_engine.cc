#include "cuda/hopper/hopper_engine.h"

#include "cuda/fp8/quantizers.h"
#include "cuda/hopper/choices.h"
#include "cuda/hopper/launch.h"
#include "cuda/hopper/products.h"

namespace sonicmoe::cuda {
namespace {

bool has_weight_grads(const Weights& g) {
  return g.gate.data != nullptr || g.up.data != nullptr || g.down.data != nullptr;
}

/// Sums into dX run beside weight gradients, because memory limits the sums and the tensor cores
/// limit the weight gradients. Memory also limits weight gradients over few rows, because they
/// mostly write their outputs. Then no sum runs beside them.
BackwardOrder backward_order(const Problem& p, const BackwardArgs& args) {
  const Weights& g = args.grads;
  BackwardOrder order{};
  order.input_grad_first = args.dx.data != nullptr && has_weight_grads(g) &&
                           row_capacity(p) / p.experts >= kSumBesideRows;
  if (!order.input_grad_first) return order;
  // If experts are narrow, the weight gradients are short: at n = 256 they hide three quarters of
  // the sum beside them. They hide more if they leave some multiprocessors to the sum.
  if (p.width < kNarrowWidth) order.companion = Companion::kTokenSum;
  const bool split = g.down.data != nullptr && (g.gate.data != nullptr || g.up.data != nullptr);
  if (split && p.width < kSplitSumWidth) {
    order.tokens_beside_down_grad = p.tokens / (p.width < kNarrowWidth ? 4 : 5);
  }
  return order;
}

}  // namespace

const Engine kHopperEngine = {
    .name = "hopper",
    .service = {.capabilities = {90, 90},
                .devices = "H100, H200",
                .dtypes = {DType::kBF16, DType::kF16},
                .multiple = 8},
    .score_columns = kCoop128x256Grad.n,
    .open = &open_hopper,
    .backward_order = &backward_order,
    .multiply_rows = &hopper_multiply_rows,
    .multiply_depth = &hopper_multiply_depth,
    .choices = kChoices,
    .describe = &hopper_tiles,
    .quantizers = &kQuantizers,
    .fast_fp8 = true,
    .adds_factors_to_codes = true,
    .awaits_rows = true,
};

}  // namespace sonicmoe::cuda
