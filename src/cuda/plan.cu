// What the tile table chooses for a problem, for people to read.
#include "cuda/backend.h"
#include "cuda/moe.h"
#include "cuda/tiles.h"

namespace sonicmoe::cuda {
namespace {

std::string words(TileId id) {
  const TileShape s = tile_shape(id);
  std::string text = std::to_string(s.m) + "x" + std::to_string(s.n);
  if (s.cluster > 1) text += ", clusters of " + std::to_string(s.cluster);
  text += s.ping_pong() ? ", ping-pong" : ", cooperative";
  return text + (s.order == Order::kDynamic ? ", drawn order" : ", static order");
}

}  // namespace

std::vector<TileChoice> layer_tiles(const Problem& p) {
  const ActivationKind kind = p.activation.kind;
  const std::int64_t rows = mean_rows(p), gates = gate_factor(kind);
  return {{"A", words(up_tile(kind, p.hidden, rows))},
          {"Y", words(row_tile(p.hidden, p.width, rows))},
          {"dH", words(hidden_grad_tile())},
          {"dW2", words(weight_grad_tile(rows))},
          {"dX~", words(row_tile(p.hidden, gates * p.width, rows))},
          {"dW1", words(weight_grad_tile(rows))}};
}

}  // namespace sonicmoe::cuda
