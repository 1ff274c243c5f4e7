// Fills the parameters of the kernels' tile schedulers.
#pragma once

#include "cuda/hopper/params.h"
#include "cuda/layer/product.h"

namespace sonicmoe::cuda {

/// `by` at least 1 and below 2^31.
Divisor divisor(std::int64_t by);

/// Tiles of a row product: the rows of a tile record by `column_step` columns, with K = `depth`.
RowTilesParams row_tiles(const RowGroups& groups, std::int64_t columns, int column_step,
                         std::int64_t depth, unsigned* counter);

/// Tiles of a depth product: one matrix (rows, columns) an expert; K is the expert's rows.
ExpertTilesParams expert_tiles(const RowGroups& groups, std::int64_t rows, std::int64_t columns,
                               const TileShape& shape);

}  // namespace sonicmoe::cuda
