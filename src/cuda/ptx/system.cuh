// Flags between GPUs, and the clock that limits waits for them.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Orders the writes that this thread has made or has seen before all that follow, for every GPU.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
/// Stores a word that another GPU reads by acquire_system(). A thread that reads the value also
/// sees all earlier writes of this thread, and all writes of kernels that were complete when this
/// kernel began.
__device__ __forceinline__ void release_system(std::uint32_t* word, std::uint32_t value) {
  asm volatile("fence.acq_rel.sys;\nst.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value)
               : "memory");
}
__device__ __forceinline__ std::uint32_t acquire_system(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
/// Nanoseconds of a clock that runs at the same rate on every multiprocessor.
__device__ __forceinline__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

}  // namespace sonicmoe::cuda::ptx
