// Loads and atomics of global memory with the caching or the ordering that their name says.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

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

/// Counts up a word that another kernel reads by acquire_word(): whoever sees the number sees what
/// this thread, and those it has met at a barrier, wrote before.
__device__ __forceinline__ void release_one(unsigned* word) {
  asm volatile("fence.acq_rel.gpu;\nred.release.gpu.global.add.u32 [%0], 1;" ::"l"(word)
               : "memory");
}
__device__ __forceinline__ unsigned acquire_word(const unsigned* word) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

}  // namespace sonicmoe::cuda::ptx
