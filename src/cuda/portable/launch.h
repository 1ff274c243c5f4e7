// Launches of the portable kernels, and what a device keeps for them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "cuda/device/device.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {

/// Of one device; it never changes.
struct State {
  Depth depth;  ///< of a pipeline stage: depth_for() the device
};

/// The largest depth whose kernels the code for a compute capability has and whose stages fit into
/// `shared` bytes of a CTA; none if no depth does.
std::optional<Depth> depth_for(int capability, int shared);

std::shared_ptr<void> open(int ordinal);
const State& state_of(const Device& device);

/// CTAs for so many tiles (an upper bound): at most one on every multiprocessor.
std::int32_t ctas_of(const Device& device, std::int64_t tiles);

/// Launches persistent CTAs. `params` is the kernel's Params.
void launch(const Device& device, const void* kernel, const void* params, std::int32_t ctas,
            cudaStream_t stream);

}  // namespace sonicmoe::cuda::portable
