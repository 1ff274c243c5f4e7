// What the metadata hands to the scheduler.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda {

/// Rows that a tile record covers.
inline constexpr int kRecordRows = 128;

/// Up to kRecordRows rows of one expert, from a multiple of kRecordRows on.
struct TileRecord {
  std::int32_t expert;
  std::int32_t begin;  ///< first row of the expert
  std::int32_t rows;   ///< rows of the expert
  std::int32_t first;  ///< index of the expert's first record
};

/// An expert, in the order in which products over its rows take them.
struct ExpertRecord {
  std::int32_t expert;
  std::int32_t begin;  ///< first row
  std::int32_t rows;
  std::int32_t unused;  ///< records are read as 16 bytes
};

}  // namespace sonicmoe::cuda
