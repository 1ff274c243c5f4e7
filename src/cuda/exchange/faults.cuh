// For kernels that find a fault: report it to the host and to all ranks.
#pragma once

#include "cuda/exchange/kernels.h"
#include "cuda/ptx/system.cuh"

namespace sonicmoe::cuda {

/// Records a fault for the host and alarms all ranks. Does nothing if the rank already has a fault,
/// because later faults are consequences of the first.
__device__ inline void give_up(const Peers& peers, const WaitLimits& limits, std::uint32_t code,
                               std::uint32_t reporter, std::int64_t rows) {
  Control* own = peers.control(peers.rank);
  if (atomicCAS(&own->fault, 0u, code) != 0) return;
  limits.record->reporter = reporter;
  limits.record->rows = rows;
  ptx::release_system(&limits.record->code, code);
  for (int phase = 0; phase < kPhaseCount; phase++) {
    own->announced[phase] = own->epochs[phase] - 1;
  }
  for (int r = 0; r < peers.ranks; r++) {
    ptx::release_system(&peers.control(r)->alarms[peers.rank], code);
  }
}

/// Whether this rank has a fault. After a fault the rank's waits end at once, so its kernels may
/// run too early. A kernel that writes to other ranks must then write nothing: a slow rank may
/// still read rows of an earlier step.
__device__ inline bool has_fault(const Peers& peers) {
  return *static_cast<volatile const std::uint32_t*>(&peers.control(peers.rank)->fault) != 0;
}

}  // namespace sonicmoe::cuda
