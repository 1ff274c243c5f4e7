// The one tile table: every tile that is built, with its reason, and the choice among them.
#pragma once

#include <cstdint>

#include "cuda/engine/shape.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

// Two CTAs of 128 rows share 256 columns of B by multicast. The best energy per flop of the tiles
// that fit: without multicast its L2 traffic exceeds what L2 gives. 4 stages and 2 store boxes per
// warpgroup fill the shared memory.
inline constexpr TileShape kCoop128x256{128, 256, 4, 2, 2, Schedule::kCooperative, Order::kStatic};

// The same with tiles drawn from a counter, which keeps the active weights inside L2: worth up to
// 8 % where a tile runs through K >= 512.
inline constexpr TileShape kCoop128x256Dynamic{
    128, 256, 4, 2, 2, Schedule::kCooperative, Order::kDynamic};

// Short K exposes the epilogue of cooperative tiles; ping-pong hides it (+14 % over cuBLAS at
// K = 256). Drawing tiles there costs more than it saves.
inline constexpr TileShape kPingPong128x192{128, 192, 4, 2, 3, Schedule::kPingPong, Order::kStatic};

// Ping-pong from K = 512 on.
inline constexpr TileShape kPingPong128x192Dynamic{
    128, 192, 4, 2, 3, Schedule::kPingPong, Order::kDynamic};

// dH has the heaviest epilogue. Ping-pong by 128x128 hides it, but what two CTAs of 256 columns
// save in loads outweighs that. Boxes for four blocks of H and two of A' leave 3 stages.
inline constexpr TileShape kCoop128x256Grad{128,           256, 3, 2, 5, Schedule::kCooperative,
                                            Order::kStatic};

/// Tiles by index, as kernels are listed.
enum class TileId : int {
  kCoop128x256 = 0,
  kCoop128x256Dynamic = 1,
  kPingPong128x192 = 2,
  kPingPong128x192Dynamic = 3,
  kCoop128x256Grad = 4,
};

constexpr TileShape tile_shape(TileId id) {
  constexpr TileShape kShapes[] = {kCoop128x256, kCoop128x256Dynamic, kPingPong128x192,
                                   kPingPong128x192Dynamic, kCoop128x256Grad};
  return kShapes[static_cast<int>(id)];
}

/// Activations whose kernels are built for every tile that pays; the others have the one that
/// serves all shapes. Every tile of every activation would double the kernels for models that
/// nobody trains.
constexpr bool has_every_tile(ActivationKind kind) {
  return kind == ActivationKind::kSwiGLU || kind == ActivationKind::kSwiGLUOai;
}

/// The up projection gathers, over d = `depth`, `rows` of an expert in the mean. Drawn tiles win 2
/// to 6 % from 1536 on; they lose 2 % at 768, where a tile is short beside what reading its number
/// costs, and 2 to 4 % where few rows make few tiles.
constexpr TileId up_tile(ActivationKind kind, std::int64_t depth, std::int64_t rows) {
  const bool drawn = depth >= 1536 && rows >= 256 && has_every_tile(kind);
  return drawn ? TileId::kCoop128x256Dynamic : TileId::kCoop128x256;
}

/// The gradient of the hidden layer.
constexpr TileId hidden_grad_tile() { return TileId::kCoop128x256Grad; }

/// Those of the weights, from `rows` of an expert in the mean. Drawn tiles even out experts of
/// different length (skewed routing -7 %, 2048 rows and more -1 to -2 %); with fewer rows a tile is
/// short beside what reading its number costs (+1.6 % at 640).
constexpr TileId weight_grad_tile(std::int64_t rows) {
  return rows >= 1024 ? TileId::kCoop128x256Dynamic : TileId::kCoop128x256;
}

/// Products over rows in order: `columns` of output, `depth` of K, `rows` of an expert in the mean.
/// 192 columns unless they waste more than 1/16 of the work. A handful of rows only streams the
/// weights: then 256 columns, of which more bytes are on their way at a time.
constexpr TileId row_tile(std::int64_t columns, std::int64_t depth, std::int64_t rows) {
  if (rows <= 64) return TileId::kCoop128x256;
  const std::int64_t waste = (columns + 191) / 192 * 192 - columns;
  const bool drawn = depth >= 512;
  if (waste * 16 > columns) return drawn ? TileId::kCoop128x256Dynamic : TileId::kCoop128x256;
  return drawn ? TileId::kPingPong128x192Dynamic : TileId::kPingPong128x192;
}

/// The same where rows are scaled, which the ping-pong tile has no registers for.
constexpr TileId scaled_row_tile(std::int64_t depth) {
  return depth >= 512 ? TileId::kCoop128x256Dynamic : TileId::kCoop128x256;
}

/// Rows that a tile record covers: those of a CTA's tile, the same for every tile, so that one list
/// serves all kernels. An odd last record of an expert does not leave half a cluster idle
/// (engine/scheduler.cuh).
inline constexpr int kRecordRows = 128;
static_assert(kCoop128x256.m == kRecordRows);
static_assert(kPingPong128x192.m == kRecordRows);
static_assert(kCoop128x256Grad.m == kRecordRows);

}  // namespace sonicmoe::cuda
