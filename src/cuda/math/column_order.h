// The order of D's columns in the registers of a lane. Plain C++: the host's tensor maps use it
// too.
#pragma once

namespace sonicmoe::cuda {

/// Which columns of D a lane of the warp holds, with q = lane % 4. wgmma and mma.sync always give
/// the lane columns 2q and 2q + 1 of each eight columns of the operand B (math/fragment.cuh).
enum class ColumnOrder : int {
  kAscending = 0,  ///< B has the columns in their order
  /// The lane holds columns 8q .. 8q + 7 of each 32, and can load and store them at once. For this
  /// B has column 8q + 2j + b of each 32 at index 8j + 2q + b (j = 0 to 3, b = 0 or 1).
  kByLane = 1,
};

}  // namespace sonicmoe::cuda
