#include "cuda/hopper/schedules.h"

#include "cuda/hopper/choices.h"

namespace sonicmoe::cuda {

Divisor divisor(std::int64_t by) {
  return {static_cast<std::uint32_t>(by),
          by == 1 ? ~0u : static_cast<std::uint32_t>((std::int64_t{1} << 32) / by)};
}

RowTilesParams row_tiles(const RowGroups& groups, std::int64_t columns, int column_step,
                         std::int64_t depth, unsigned* counter) {
  RowTilesParams tiles{};
  tiles.records = groups.lists->records;
  tiles.record_count = groups.lists->record_count;
  tiles.tile_counter = counter;
  tiles.columns = static_cast<std::int32_t>(columns);
  tiles.column_tiles = static_cast<std::int32_t>((columns + column_step - 1) / column_step);
  tiles.column_step = column_step;
  tiles.k_tiles = static_cast<std::int32_t>((depth + kDepth - 1) / kDepth);
  tiles.k_parts = 1;
  tiles.raster_group = 1;
  tiles.wave = divisor(1);
  return tiles;
}

ExpertTilesParams expert_tiles(const RowGroups& groups, std::int64_t rows, std::int64_t columns,
                               const TileShape& shape) {
  ExpertTilesParams tiles{};
  tiles.longest_first = groups.longest_first;
  tiles.expert_begin = groups.lists->expert_begin;
  tiles.expert_rows = groups.lists->expert_rows;
  tiles.experts = static_cast<std::int32_t>(groups.experts);
  tiles.rows = static_cast<std::int32_t>(rows);
  tiles.columns = static_cast<std::int32_t>(columns);
  tiles.column_step = shape.n;
  tiles.column_tiles = static_cast<std::int32_t>((columns + shape.n - 1) / shape.n);
  const std::int32_t ctas = (tiles.rows + shape.m - 1) / shape.m;
  const std::int32_t odd = ctas % 2;
  tiles.row_tiles = ctas / 2;
  tiles.tiles_per_expert =
      divisor(tiles.row_tiles * tiles.column_tiles + odd * (tiles.column_tiles + 1) / 2);
  tiles.columns_fastest = columns_fastest(tiles.row_tiles, tiles.column_tiles) ? 1 : 0;
  tiles.raster_group =
      divisor(tiles.columns_fastest != 0 ? tiles.column_tiles : 2 * tiles.row_tiles + odd);
  return tiles;
}

}  // namespace sonicmoe::cuda
