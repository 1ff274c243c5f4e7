// Limits of expert parallelism that checks and the CUDA backend share.
#pragma once

namespace sonicmoe {

/// Most ranks of an exchange.
inline constexpr int kMaxRanks = 64;

}  // namespace sonicmoe
