// What row products of elements and of codes share on the host.
#pragma once

#include "cuda/blackwell/params.h"
#include "cuda/layer/engine.h"

namespace sonicmoe::cuda::blackwell {

/// The tiles of a product of elements, without `limit` and the segments of K.
RowTilesParams row_tiles_of(const RowProduct& product);

/// The number of pairs for so many tiles. It is odd, so that no pair gets the skipped tiles alone
/// (engine/tiles.cuh).
std::int64_t odd_pairs(const Device& device, std::int64_t tiles);

/// A product whose rows and weights have scales, without a low-rank term.
void multiply_codes_within(const WaitLimit& limit, const Device& device, const RowProduct& product,
                           cudaStream_t stream);

}  // namespace sonicmoe::cuda::blackwell
