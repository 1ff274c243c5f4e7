// Launches of the portable kernels, and what a device keeps for them.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/device/device.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {

/// Of one device; it never changes.
struct State {
  Depth depth;  ///< of a pipeline stage: the most that its shared memory holds
};

std::shared_ptr<void> open(int ordinal);
const State& state_of(const Device& device);

/// CTAs of a launch of so many tiles (an upper bound): at most one on every multiprocessor.
std::int64_t ctas_of(const Device& device, std::int64_t tiles);

/// Launches ctas_of() persistent CTAs. `params` is the kernel's Params.
void launch(const Device& device, const void* kernel, const void* params, std::int64_t tiles,
            cudaStream_t stream);

}  // namespace sonicmoe::cuda::portable
