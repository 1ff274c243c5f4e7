// What this CPU can do at best, measured in a fraction of a second.
#pragma once

#include "core/plan.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cli {

/// Multiply-add throughput of the widest vectors that the backend uses for `dtype` (bf16 dot
/// products where the CPU has them), and the bandwidth of reading and writing large arrays, both
/// with exec's threads.
Machine measured_cpu(DType dtype, const Exec& exec);

}  // namespace sonicmoe::cli
