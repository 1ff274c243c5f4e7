// Launches of the pairs' kernels, and the state that a device keeps for them.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda/blackwell/params.h"
#include "cuda/device/device.h"
#include "cuda/layer/product.h"
#include "cuda/tma/tensor_map.h"

namespace sonicmoe::cuda::blackwell {

/// The state of one device; it never changes.
struct State {
  EncodeTensorMap encode;
};

std::shared_ptr<void> open(int ordinal);
const State& state_of(const Device& device);

/// One pair of CTAs for two multiprocessors each, but at most one for each of `tiles`; at least
/// one.
std::int64_t pairs_of(const Device& device, std::int64_t tiles);

/// kWithRowsOf is kAfterPrevious: no kernel releases rows before its end.
LaunchOrder order_of(const LaunchHints& hints);

/// The tile counter of a product; null for static order.
unsigned* counter_of(const RowGroups& groups, const LaunchHints& hints);

/// A kernel, and what each of its CTAs has.
struct Kernel {
  const void* function;
  int threads = kThreads;
  int shared_bytes = kSharedBytes;
};

/// Launches `kernel`. `params` is its argument.
void run(const Kernel& kernel, std::int64_t pairs, const void* params, cudaStream_t stream);

}  // namespace sonicmoe::cuda::blackwell
