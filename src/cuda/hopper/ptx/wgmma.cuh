// Warpgroup matrix products: operand descriptors and synchronization. generate_wgmma.py writes the
// products, Wgmma<Element, N, kMnA, kMnB>::run(accumulator, a, b, accumulate).
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Shared-memory matrix descriptor of an operand with the 128-byte swizzle. It holds the start, the
/// leading offset and the stride offset in units of 16 bytes, and swizzle mode 1 at bit 62. Layouts
/// of 16-bit operands:
///   K-major:  rows of 128 bytes (64 k); 8 rows = 1024 bytes; 16 k further = +32 bytes;
///   MN-major: groups of 64 mn x 64 k of 8192 bytes; 8 k = 1024 bytes; 16 k further = +2048 bytes.
/// The descriptors of an operand's steps along K differ only in the start. The start holds the low
/// 18 bits of a shared address, because the bits above them hold the CTA's rank in its cluster. A
/// stage never crosses a multiple of 2^18, so one addition gives the next descriptor.
struct SwizzledOperand {
  std::uint32_t low;

  __device__ __forceinline__ SwizzledOperand(std::uint32_t address, std::uint32_t leading)
      : low((address & 0x3ffff) >> 4 | leading >> 4 << 16) {}
  /// The descriptor of the operand that lies `bytes` further.
  __device__ __forceinline__ std::uint64_t at(std::uint32_t bytes) const {
    constexpr std::uint64_t kHigh = std::uint64_t{1024 >> 4} | std::uint64_t{1} << 30;
    return (low + (bytes >> 4)) | kHigh << 32;
  }
};

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

}  // namespace sonicmoe::cuda::ptx
