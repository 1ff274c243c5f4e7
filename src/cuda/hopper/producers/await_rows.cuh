// The wait of a gathering producer for rows of other GPUs.
#pragma once

#include "cuda/metadata/row_arrivals.h"
#include "cuda/ptx/system.cuh"

namespace sonicmoe::cuda {

/// Waits until the rows that a warp is about to copy are in this GPU's memory. All 32 lanes call
/// it. `row`: the row that this lane will copy, negative if it copies none. Lane l polls the flag
/// of source l + 1; when the function returns, every lane may copy. The pointers are read again in
/// each round of the loop, because the producer of A has no free register to keep them in.
__device__ __forceinline__ void await_rows(const RowArrivals& a, int row) {
  constexpr unsigned kPause = 500;  // nanoseconds; all warps of the GPU read the same words
  const int last = __reduce_max_sync(~0u, row);
  if (last < a.tokens) return;
  const int source = (static_cast<int>(threadIdx.x) & 31) + 1;
  int rank = a.rank + source;
  if (rank >= a.ranks) rank -= a.ranks;
  bool waits = source < a.ranks && last >= source * a.tokens;
  for (;;) {
    if (waits) {
      const auto epoch = *static_cast<const volatile std::uint32_t*>(a.epoch);
      waits = static_cast<std::int32_t>(ptx::acquire_system(a.flags + rank) - epoch) < 0;
    }
    if (!__any_sync(~0u, waits)) break;
    if (waits) {
      auto* late = static_cast<volatile std::uint32_t*>(a.late);
      if (ptx::nanoseconds() > *static_cast<const volatile std::uint64_t*>(a.deadline)) {
        *late = 1 + rank;
      }
      waits = *late == 0 && ptx::acquire_system(a.alarms + rank) == 0;
    }
    if (!__any_sync(~0u, waits)) break;
    __nanosleep(kPause);
  }
  __syncwarp();
}

}  // namespace sonicmoe::cuda
