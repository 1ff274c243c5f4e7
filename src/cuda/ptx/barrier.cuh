// Named barriers: groups of warps inside one CTA.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Named barriers 1..15 of the CTA. `threads` is the number of threads that sync plus the number
/// that only arrive.
__device__ __forceinline__ void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace sonicmoe::cuda::ptx
