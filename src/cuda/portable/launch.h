// Launches the portable kernels. Defines the state that a device handle keeps for them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "cuda/device/device.h"
#include "cuda/portable/shape.h"

namespace sonicmoe::cuda::portable {

/// The engine's state for one device; it never changes.
struct State {
  Depth depth;  ///< of a pipeline stage, as depth_for() chose it
};

/// The largest depth for which the code for a compute capability has kernels and whose shared
/// memory fits into `shared` bytes; none if there is no such depth.
std::optional<Depth> depth_for(int capability, int shared);

std::shared_ptr<void> open(int ordinal);
const State& state_of(const Device& device);

/// The number of CTAs to launch for at most `tiles` tiles: at most one on each multiprocessor.
std::int32_t ctas_of(const Device& device, std::int64_t tiles);

/// Launches persistent CTAs. `params` is the kernel's Params.
void launch(const Device& device, const void* kernel, const void* params, std::int32_t ctas,
            cudaStream_t stream);

}  // namespace sonicmoe::cuda::portable
