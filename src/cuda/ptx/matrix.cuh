// Warpgroup matrix products and the fragment moves around them. The products themselves are
// generated (generate_wgmma.py): wgmma<Element, N, A order, B order>(accumulator, a, b,
// accumulate).
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Shared-memory matrix descriptor of a 128-byte-swizzled operand (start, leading and stride byte
/// offsets in units of 16, swizzle mode 1 at bit 62).
///   K-major:  rows of 128 bytes (64 k); 8 rows = 1024 bytes; 16 k further = +32 bytes;
///   MN-major: groups of 64 mn x 64 k of 8192 bytes; 8 k = 1024 bytes; 16 k further = +2048 bytes.
/// Only the start changes from one to the next. It has 18 bits without the CTA's rank in its
/// cluster, which addresses carry above them, and never reaches their end: one addition moves it.
struct SwizzledOperand {
  std::uint32_t low;

  __device__ __forceinline__ SwizzledOperand(std::uint32_t address, std::uint32_t leading)
      : low((address & 0x3ffff) >> 4 | leading >> 4 << 16) {}
  /// Of what lies `bytes` further.
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
/// Until at most kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(std::uint32_t address, const std::uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}
__device__ __forceinline__ void load_matrices(std::uint32_t (&m)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}
/// Two words, 8 bytes aligned.
__device__ __forceinline__ void load_words(std::uint32_t& low, std::uint32_t& high,
                                           std::uint32_t address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(low), "=r"(high)
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_words(std::uint32_t address, std::uint32_t low,
                                            std::uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(low), "r"(high) : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t address,
                                                          const std::uint32_t (&m)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
      : "memory");
}
/// A word that no kernel in flight writes. Loaded at each use: a register holds it no longer.
__device__ __forceinline__ std::int32_t load_again(const std::int32_t* pointer) {
  std::int32_t value;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(value) : "l"(pointer));
  return value;
}
/// Adds 1 to a number below 2^31 and returns what was there; the warp goes on until that is used.
/// An addition would not do: ptxas gathers those of a warp into one and hands the result round, for
/// which the warp waits on the spot.
__device__ __forceinline__ std::uint32_t count_up(std::uint32_t* counter) {
  std::uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}
/// 16 bytes that no kernel in flight writes.
__device__ __forceinline__ uint4 load_constant16(const void* pointer) {
  uint4 r;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(pointer));
  return r;
}
/// 8 of them.
__device__ __forceinline__ uint2 load_constant8(const void* pointer) {
  uint2 r;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(pointer));
  return r;
}

}  // namespace sonicmoe::cuda::ptx
