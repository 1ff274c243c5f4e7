// Every choice of the engine and its thresholds. `sonicmoe info --json` shows them (kChoices).
#pragma once

#include <cstdint>

#include "core/backend_table.h"

namespace sonicmoe::cuda::blackwell {

/// Mean rows of an expert.
inline constexpr std::int64_t kDynamicRows = 256;
inline constexpr std::int64_t kSumBesideRows = 256;

inline constexpr EngineChoice kChoices[] = {
    {"dynamic rows", kDynamicRows,
     "from so many rows pairs take tiles by a counter, as gathering products of the engine hopper "
     "do; nobody has measured it here"},
    {"sum beside rows", kSumBesideRows,
     "from so many rows sums of dX run beside weight gradients, as in the engine hopper; nobody "
     "has "
     "measured it here"},
};

}  // namespace sonicmoe::cuda::blackwell
