// Prefetch to L2.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Brings the cache line of the address to L2. The thread does not wait for it.
__device__ __forceinline__ void prefetch_l2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

}  // namespace sonicmoe::cuda::ptx
