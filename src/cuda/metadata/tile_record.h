// The lists of the metadata that tile schedulers and loaders read.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda {

/// Rows that a tile record covers at most.
inline constexpr int kRecordRows = 128;

/// Up to kRecordRows rows of one expert: record i has the rows from begin + (i - first) *
/// kRecordRows on.
struct TileRecord {
  std::int32_t expert;
  std::int32_t begin;  ///< first row of the expert
  std::int32_t rows;   ///< rows of the expert
  std::int32_t first;  ///< index of the expert's first record
};

/// An expert in the list of experts by descending number of rows. Depth products process the
/// experts in this order.
struct ExpertRecord {
  std::int32_t expert;
  std::int32_t begin;  ///< first row
  std::int32_t rows;
  std::int32_t unused;  ///< records are read as 16 bytes
};

}  // namespace sonicmoe::cuda
