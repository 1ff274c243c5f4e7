// For a product whose rows come from other GPUs while it runs.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda {

inline constexpr int kMostArrivals = 32;

/// When rows of other GPUs are in this GPU's memory. Row t of the product's gathered rows is of
/// source t / tokens. The rows of source s > 0 have come when flags[(rank + s) % ranks] has reached
/// the epoch; those of source 0 are there before the launch.
///
/// A product waits before a tile for the source of the tile's last row, and for all sources before
/// it. After the deadline it sets `late` to 1 + the rank and goes on with whatever the rows are;
/// it also goes on if `late` is set or if a rank that it waits for has an alarm. So a wait for all
/// ranks must follow it, which reports the fault.
struct RowArrivals {
  const std::uint32_t* flags;   ///< (ranks); null: all rows are there before the launch
  const std::uint32_t* epoch;   ///< written before the launch
  const std::uint32_t* alarms;  ///< (ranks) not 0: the rank has a fault
  std::uint32_t* late;
  const std::uint64_t* deadline;  ///< of ptx::nanoseconds()
  std::int32_t tokens;            ///< of a source
  std::int32_t rank;
  std::int32_t ranks;  ///< at most kMostArrivals
};

}  // namespace sonicmoe::cuda
