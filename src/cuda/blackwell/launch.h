// Launches of the pairs' kernels, and the state that a device keeps for them.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/device/device.h"
#include "cuda/portable/launch.h"
#include "cuda/tma/tensor_map.h"

namespace sonicmoe::cuda::blackwell {

/// The state of one device; it never changes. It is the portable engine's state too, because that
/// engine's kernels compute some products.
struct State : portable::State {
  State(const portable::State& base, EncodeTensorMap encode)
      : portable::State(base), encode(encode) {}
  EncodeTensorMap encode;
};

std::shared_ptr<void> open(int ordinal);
const State& state_of(const Device& device);

/// Launches `kernel` with at least one pair of CTAs, and at most one for each of `tiles` and for
/// two multiprocessors each. `params` is the kernel's argument.
void run(const Device& device, const void* kernel, std::int64_t tiles, const void* params,
         cudaStream_t stream);

}  // namespace sonicmoe::cuda::blackwell
