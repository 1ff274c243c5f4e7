// Prefetch to L2.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Asks for the line of L2 that holds the address; the thread waits for nothing.
__device__ __forceinline__ void prefetch_l2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

}  // namespace sonicmoe::cuda::ptx
