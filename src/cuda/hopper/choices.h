// Every choice of the engine: the tiles that are built, why they exist and when they are taken, and
// all thresholds. `sonicmoe info --json` shows the thresholds (kChoices).
#pragma once

#include <cstdint>

#include "core/backend_table.h"
#include "cuda/hopper/engine/shape.h"
#include "cuda/metadata/tile_record.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// Which tile a cluster computes next. kStatic: the next of its own tiles (index, index + clusters,
/// ...). kDynamic: the next tile that no cluster has taken, by an atomic counter. Dynamic order
/// keeps the weights in use inside L2, because clusters compute neighbouring tiles. Static order
/// costs nothing. Every kernel supports both.
enum class Order : int { kStatic = 0, kDynamic = 1 };

// Two CTAs of 128 rows share 256 columns of B by multicast. Of the tiles that fit, this one takes
// the least energy per flop. Without multicast its loads would need more bandwidth than L2 has. 4
// stages and 2 store boxes a warpgroup fill the shared memory.
inline constexpr TileShape kCoop128x256{128, 256, 4, 2, 2, Schedule::kCooperative};

// For a very short K. There even the part of a deferred epilogue that runs between two tiles takes
// much of the time. In ping-pong the whole epilogue of a tile runs under the products of another
// tile. Also for widths that 192 divides well and 256 does not (row_tiling()).
inline constexpr TileShape kPingPong128x192{128, 192, 4, 2, 3, Schedule::kPingPong};

// For dH, whose epilogue takes longest. A ping-pong tile of 128x128 would hide the epilogue, but
// its additional loads cost more time than this saves. The tile has no store boxes: H arrives in
// pipeline stages, and dH and A' are stored from the memory of these stages.
inline constexpr TileShape kCoop128x256Grad{128, 256, 4, 2, 0, Schedule::kCooperative};

// For products of at most kFewColumns columns: those with low-rank factors. Memory limits them, so
// the tile has many stages. A wider tile would fill most of a stage's memory with zeros.
inline constexpr TileShape kNarrow128x64{128, 64, 7, 2, 2, Schedule::kCooperative};

// A CTA without dynamic shared memory (a sum) must fit beside a CTA of a weight gradient. The
// hardware reserves 1 KB of shared memory for each CTA.
static_assert(shared_bytes(kCoop128x256) + 2 * 1024 <= 228 * 1024);
static_assert(shared_bytes(kNarrow128x64) + 2 * 1024 <= 228 * 1024);

// Thresholds; each reason is in kChoices. Rows are the mean number of rows of an expert.
inline constexpr std::int64_t kFewColumns = 128;
inline constexpr std::int64_t kNarrowWidth = 512;
inline constexpr std::int64_t kSplitSumWidth = 768;
inline constexpr std::int64_t kFewRows = 64;
inline constexpr std::int64_t kDynamicRows = 256;
inline constexpr std::int64_t kSumBesideRows = 256;
inline constexpr std::int64_t kShortDepth = 512;
inline constexpr std::int64_t kDynamicDepth = 1024;
inline constexpr std::int64_t kFewColumnTiles = 16;
inline constexpr std::int64_t kEarlyReleaseWaves = 24;
inline constexpr std::int64_t kManyClusters = 64;
inline constexpr std::int64_t kLargeMatrixBytes = std::int64_t{24} << 20;

inline constexpr EngineChoice kChoices[] = {
    {"few columns", kFewColumns,
     "products of at most so many columns take the tile 128 x 64: a wider one is mostly zeros"},
    {"narrow width", kNarrowWidth,
     "below this n memory limits the products: dX~ does not start beside dH, and weight gradients "
     "leave multiprocessors to the sum beside them"},
    {"split sum width", kSplitSumWidth,
     "below this n part of the sum of dX runs beside dW2: dW1 is too short to hide all of it"},
    {"few rows", kFewRows,
     "up to so many rows memory limits the products: the widest tile, and no tile is split"},
    {"dynamic rows", kDynamicRows,
     "from so many rows gathering products balance tiles by a counter; with fewer rows the counter "
     "costs more time than it saves"},
    {"sum beside rows", kSumBesideRows,
     "from so many rows sums of dX run beside weight gradients; with fewer rows memory limits "
     "both"},
    {"short depth", kShortDepth, "below this K the ping-pong tile is 3 to 7 % faster (H200)"},
    {"dynamic depth", kDynamicDepth,
     "from this K products of ordered rows gain up to 5 % from tiles by a counter (H200)"},
    {"few column tiles", kFewColumnTiles,
     "up to so many column tiles a weight gradient visits them first, to reuse gathered rows"},
    {"early release waves", kEarlyReleaseWaves,
     "below so many waves of tiles dX~ starts beside the last tiles of dH"},
    {"many clusters", kManyClusters,
     "only a weight gradient of more clusters leaves two of them to the sum beside it"},
    {"large matrix bytes", kLargeMatrixBytes,
     "an expert's matrix above half of L2 is visited by 8 pairs of records at a time (2 to 3 %, "
     "H200)"},
};

/// Index of a tile in the list of kernels.
enum class TileId : int {
  kCoop128x256 = 0,
  kPingPong128x192 = 1,
  kCoop128x256Grad = 2,
  kNarrow128x64 = 3,
};

constexpr TileShape tile_shape(TileId id) {
  constexpr TileShape kShapes[] = {kCoop128x256, kPingPong128x192, kCoop128x256Grad, kNarrow128x64};
  return kShapes[static_cast<int>(id)];
}

/// The tile and the tile order of a launch.
struct Tiling {
  TileId tile;
  Order order;

  constexpr TileShape shape() const { return tile_shape(tile); }
  /// The counter that the kernel gets: null for static order.
  constexpr unsigned* counter(unsigned* tile_counter) const {
    return order == Order::kDynamic ? tile_counter : nullptr;
  }
};

/// For products that gather; `rows` is the mean number of rows of an expert. Dynamic order balances
/// experts of different length and clusters of different speed. With few rows the tiles are few or
/// short, and taking indices from the counter costs more time than the order saves.
constexpr Order gathered_order(std::int64_t rows) {
  return rows >= kDynamicRows ? Order::kDynamic : Order::kStatic;
}
/// For products over rows in expert order. Dynamic order gains up to 5 % from this depth on.
constexpr Order ordered_order(std::int64_t depth) {
  return depth >= kDynamicDepth ? Order::kDynamic : Order::kStatic;
}

/// A and the gradients of the weights.
constexpr Tiling gathered_tiling(std::int64_t rows) {
  return {TileId::kCoop128x256, gathered_order(rows)};
}

/// Products of few columns, of any rows.
constexpr Tiling narrow_tiling(std::int64_t rows) {
  return {TileId::kNarrow128x64, gathered_order(rows)};
}

/// dH.
constexpr Tiling hidden_grad_tiling(std::int64_t rows) {
  return {TileId::kCoop128x256Grad, gathered_order(rows)};
}

/// Whether the tiles of dH's last wave may be split in halves of 64 rows, so that more clusters
/// compute a part of the wave. If experts have at most 64 rows, the second half of every split tile
/// would be empty, and its weights would be loaded for nothing.
constexpr bool splits_last_wave(std::int64_t rows) { return rows > kFewRows; }

/// Whether the tiles of an expert's weight gradient, `row_tiles` along M by `column_tiles` along N,
/// are numbered with the columns fastest. Neighbouring tiles then read the same gathered rows (A),
/// which cost more to load than the rows in expert order (B).
///
/// Not with more than 16 column tiles if they are also more than the row tiles: the tiles that are
/// computed at one time would then have only a few row tiles, and B would be loaded again for every
/// few row tiles.
constexpr bool columns_fastest(std::int64_t row_tiles, std::int64_t column_tiles) {
  return column_tiles <= kFewColumnTiles || column_tiles <= row_tiles;
}

/// For products over rows in expert order, `columns` wide and `depth` deep; `rows` is the mean
/// number of rows of an expert. The first line that applies decides; measured on an H200:
///
///   | where                                     | tile       | why                             |
///   | at most 64 rows                           | 128 x 256  | memory limits the product; more |
///   |                                           |            | bytes of weights are in flight  |
///   | depth < 512, and 192 divides well         | ping-pong  | 3 to 7 % faster                 |
///   | 192 divides well, 256 does not            | ping-pong  | as fast, and less waste         |
///   | else                                      | 128 x 256  |                                 |
///
/// A tile divides well if the last tile wastes at most 1/16 of the columns.
constexpr Tiling row_tiling(std::int64_t columns, std::int64_t depth, std::int64_t rows) {
  if (rows <= kFewRows) return {TileId::kCoop128x256, Order::kStatic};
  const auto fits = [&](int tile) { return (tile - columns % tile) % tile * 16 <= columns; };
  const bool ping_pong = fits(192) && (depth < kShortDepth || !fits(256));
  return {ping_pong ? TileId::kPingPong128x192 : TileId::kCoop128x256, ordered_order(depth)};
}

/// As row_tiling(), for rows that are scaled: the ping-pong tile has no registers for the scales.
constexpr Tiling scaled_row_tiling(std::int64_t depth) {
  return {TileId::kCoop128x256, ordered_order(depth)};
}

/// The number of record pairs that visit a column tile before any of them visits the next one
/// (RasterOrder::kGrouped). It is more than 1 if an expert's matrix takes more than half of L2:
/// each pair would otherwise load much of the matrix again (d = 7168, n = 2048: 2 to 3 %, H200).
constexpr std::int32_t raster_group(std::int64_t columns, std::int64_t depth) {
  return columns * depth * kElementBytes > kLargeMatrixBytes ? 8 : 1;
}

// One list of tile records serves every tile shape, because a record has the rows of a CTA's tile.
// An odd last record of an expert leaves no CTA of a cluster idle (engine/row_tiles.cuh).
static_assert(kCoop128x256.m == kRecordRows);
static_assert(kPingPong128x192.m == kRecordRows);
static_assert(kCoop128x256Grad.m == kRecordRows);
static_assert(kNarrow128x64.m == kRecordRows);

}  // namespace sonicmoe::cuda
