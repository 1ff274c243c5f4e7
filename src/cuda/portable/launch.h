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
  Depth depth;                        ///< of a stage of the wide tile, as depth_for() chose it
  std::optional<Depth> narrow_depth;  ///< of the narrow tile, as narrow_depth_for() chose it
  bool unpacks;                       ///< whether the code has the products of packed weights
};

std::shared_ptr<void> open(int ordinal);
const State& state_of(const Device& device);

/// The number of CTAs to launch for at most `tiles` tiles: at most as many as run at once.
std::int32_t ctas_of(const Device& device, const TileShape& shape, std::int64_t tiles);

/// A kernel and its CTAs, which are persistent.
struct Launch {
  const void* kernel;
  TileShape shape;
  std::int32_t ctas;
  std::int32_t more_bytes = 0;  ///< of shared memory, beyond shared_bytes(shape)
};
/// `params` is the kernel's Params.
void run(const Launch& launch, const void* params, cudaStream_t stream);

}  // namespace sonicmoe::cuda::portable
