// The tile table's choices for a layer, as text.
#include "cuda/hopper/choices.h"
#include "cuda/hopper/products.h"

namespace sonicmoe::cuda {
namespace {

std::string words(Tiling tiling) {
  const TileShape s = tiling.shape();
  std::string text = std::to_string(s.m) + "x" + std::to_string(s.n);
  if (s.cluster > 1) text += ", clusters of " + std::to_string(s.cluster);
  text += s.ping_pong() ? ", ping-pong" : ", cooperative";
  return text + (tiling.order == Order::kDynamic ? ", dynamic order" : ", static order");
}

/// The products of codes have one tile (fp8/shape.h).
std::vector<TileChoice> fp8_tiles(const Problem& p) {
  const std::int64_t rows = row_capacity(p) / p.experts;
  const std::string codes = "128x256 in FP8, clusters of 2, cooperative";
  return {{"A", codes},   {"Y", codes},
          {"dH", codes},  {"dW2", words(gathered_tiling(rows))},
          {"dX~", codes}, {"dW1", words(gathered_tiling(rows))}};
}

}  // namespace

std::vector<TileChoice> hopper_tiles(const Problem& p) {
  if (p.precision == Precision::kFp8) return fp8_tiles(p);
  const ActivationKind kind = p.activation.kind;
  const std::int64_t rows = row_capacity(p) / p.experts, gates = gate_factor(kind);
  // Y of grouped rows is scaled by row.
  const bool scaled = p.form == RoutingForm::kGrouped;
  return {{"A", words(gathered_tiling(rows))},
          {"Y", words(scaled ? scaled_row_tiling(p.width) : row_tiling(p.hidden, p.width, rows))},
          {"dH", words(hidden_grad_tiling(rows))},
          {"dW2", words(gathered_tiling(rows))},
          {"dX~", words(row_tiling(p.hidden, gates * p.width, rows))},
          {"dW1", words(gathered_tiling(rows))}};
}

}  // namespace sonicmoe::cuda
