#pragma once

#include <cstdint>

namespace sonicmoe::faults {

/// Random small layers and routing for `steps` steps. Returns 0 if resident memory stayed flat.
int soak(std::int64_t steps);

}  // namespace sonicmoe::faults
