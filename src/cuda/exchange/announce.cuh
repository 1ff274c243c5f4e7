// For kernels that send and announce what they have sent.
#pragma once

#include "cuda/exchange/faults.cuh"

namespace sonicmoe::cuda {

/// Called by all threads of a block when their stores are done: the block that ends last announces
/// the phase to the ranks in `to`.
__device__ __forceinline__ void announce_at_end(const Peers& peers, Phase phase, std::uint64_t to,
                                                PushProgress* progress) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  ptx::fence_system();
  if (atomicAdd(&progress->ended, 1u) + 1 != gridDim.x) return;
  *progress = {};
  if (has_fault(peers)) return;
  const std::uint32_t epoch = peers.control(peers.rank)->epochs[phase];
  for (int r = 0; r < peers.ranks; r++) {
    if (r == peers.rank || (to >> r & 1) == 0) continue;
    ptx::release_system(&peers.control(r)->flags[phase][peers.rank], epoch);
  }
}

}  // namespace sonicmoe::cuda
