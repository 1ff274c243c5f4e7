// The one tile table: every tile that is built, with its reason, and the choice among them.
#pragma once

#include <cstdint>

#include "cuda/hopper/engine/shape.h"
#include "cuda/metadata/tile_record.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// Who decides which tile a cluster takes next: its index, or a counter. The counter keeps the
/// active window of weights inside L2; static order costs nothing. Kernels take both.
enum class Order : int { kStatic = 0, kDrawn = 1 };

// Two CTAs of 128 rows share 256 columns of B by multicast. The best energy per flop of the tiles
// that fit: without multicast its L2 traffic exceeds what L2 gives. 4 stages and 2 store boxes per
// warpgroup fill the shared memory.
inline constexpr TileShape kCoop128x256{128, 256, 4, 2, 2, Schedule::kCooperative};

// Very short K exposes even what little of a deferred epilogue is left between two tiles of this
// form; in ping-pong one tile's epilogue runs under the other one's products.
inline constexpr TileShape kPingPong128x192{128, 192, 4, 2, 3, Schedule::kPingPong};

// dH has the heaviest epilogue. Ping-pong by 128x128 hides it, but what two CTAs of 256 columns
// save in loads outweighs that. H comes through the ring, and is stored from there: no boxes.
inline constexpr TileShape kCoop128x256Grad{128, 256, 4, 2, 0, Schedule::kCooperative};

// Beside a weight gradient a multiprocessor has room for the 1 KB that a block without shared
// memory of its own takes (as each block takes beside its own).
static_assert(shared_bytes(kCoop128x256) + 2 * 1024 <= 228 * 1024);

/// Columns of A below which an expert is narrow: its products move more than they multiply.
inline constexpr std::int64_t kNarrowWidth = 512;

/// Tiles by index, as kernels are listed.
enum class TileId : int {
  kCoop128x256 = 0,
  kPingPong128x192 = 1,
  kCoop128x256Grad = 2,
};

constexpr TileShape tile_shape(TileId id) {
  constexpr TileShape kShapes[] = {kCoop128x256, kPingPong128x192, kCoop128x256Grad};
  return kShapes[static_cast<int>(id)];
}

/// A tile, and the order of a launch.
struct Tiling {
  TileId tile;
  Order order;

  constexpr TileShape shape() const { return tile_shape(tile); }
  /// The launch's counter, or null for static order.
  constexpr unsigned* counter(unsigned* drawn) const {
    return order == Order::kDrawn ? drawn : nullptr;
  }
};

/// Products that gather `rows` of an expert in the mean. Drawn tiles even out experts of different
/// length, and clusters that drift apart. Few rows make few or short tiles, for which reading a
/// number costs more.
constexpr Order gathered_order(std::int64_t rows) {
  return rows >= 256 ? Order::kDrawn : Order::kStatic;
}

/// The up projection and the gradients of the weights.
constexpr Tiling gathered_tiling(std::int64_t rows) {
  return {TileId::kCoop128x256, gathered_order(rows)};
}

/// The gradient of the hidden layer.
constexpr Tiling hidden_grad_tiling(std::int64_t rows) {
  return {TileId::kCoop128x256Grad, gathered_order(rows)};
}

/// Whether the last round of tiles of the hidden layer's gradient may be cut in halves of rows.
/// Where experts have no second half, both load the expert's matrix for one.
constexpr bool cuts_last_round(std::int64_t rows) { return rows > 64; }

/// The order of an expert's tiles, `lines` of them along M and `across` along N. Columns fastest:
/// neighbours share the gathered rows, the dearer operand. Past sixteen tiles of columns those at
/// work would cover few lines, and load the grouped rows for each few of them anew.
constexpr bool fast_columns(std::int64_t lines, std::int64_t across) {
  return across <= 16 || across <= lines;
}

/// Products over rows in order: `columns` of output, `depth` of K, `rows` of an expert in the mean.
/// Ping-pong wins 3 to 7 % below K = 512, and keeps up where 256 columns would waste more than 1/16
/// of the work and 192 do not. Drawn tiles are worth up to 5 % from K = 1024 on. A handful of rows
/// only streams the weights: then 256 columns, of which more bytes are on their way at a time.
constexpr Tiling row_tiling(std::int64_t columns, std::int64_t depth, std::int64_t rows) {
  if (rows <= 64) return {TileId::kCoop128x256, Order::kStatic};
  const auto fits = [&](int tile) { return (tile - columns % tile) % tile * 16 <= columns; };
  const bool ping_pong = fits(192) && (depth < 512 || !fits(256));
  return {ping_pong ? TileId::kPingPong128x192 : TileId::kCoop128x256,
          depth >= 1024 ? Order::kDrawn : Order::kStatic};
}

/// Pairs of records that go through the columns together. Where a matrix of an expert takes more
/// than half of L2, pairs in turn would load much of it anew (d = 7168, n = 2048: 2 to 3 %).
constexpr std::int32_t row_band(std::int64_t columns, std::int64_t depth) {
  return columns * depth * kElementBytes > (std::int64_t{24} << 20) ? 8 : 1;
}

/// The same where rows are scaled, which the ping-pong tile has no registers for.
constexpr Tiling scaled_row_tiling(std::int64_t depth) {
  return {TileId::kCoop128x256, depth >= 1024 ? Order::kDrawn : Order::kStatic};
}

// One list of tile records serves every tile: a record has the rows of a CTA's tile.
static_assert(kCoop128x256.m == kRecordRows);
static_assert(kPingPong128x192.m == kRecordRows);
static_assert(kCoop128x256Grad.m == kRecordRows);

}  // namespace sonicmoe::cuda
