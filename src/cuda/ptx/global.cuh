// Loads and atomics of global memory with a fixed caching or memory ordering.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Loads a word that no running kernel writes. Every call loads it again, so that no register holds
/// it between two uses.
__device__ __forceinline__ std::int32_t load_again(const std::int32_t* pointer) {
  std::int32_t value;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(value) : "l"(pointer));
  return value;
}
/// Adds 1 to a number below 2^31 and returns its old value; the warp waits only where the old value
/// is used. An atomic addition would wait at once: ptxas combines the additions of a warp's lanes
/// into one and shuffles the result to the lanes.
__device__ __forceinline__ std::uint32_t count_up(std::uint32_t* counter) {
  std::uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}
/// Loads 16 bytes by ld.global.nc: only after wait_for_previous_kernel() (ptx/dependent.cuh).
__device__ __forceinline__ uint4 load_constant16(const void* pointer) {
  uint4 r;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(pointer));
  return r;
}
/// Loads a word by ld.global. The compiler may move the load past stores, or repeat it.
__device__ __forceinline__ std::int32_t load4(const std::int32_t* pointer) {
  std::int32_t value;
  asm("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer));
  return value;
}
/// Loads 8 bytes by ld.global. The compiler does not move the load past other volatile statements.
__device__ __forceinline__ uint2 load8(const void* pointer) {
  uint2 r;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(pointer));
  return r;
}

/// Stores 16 bytes if `valid`. Unlike an if, it is no branch, so the compiler moves arithmetic past
/// it.
__device__ __forceinline__ void store16_if(bool valid, void* pointer, uint4 words) {
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.u32 valid, %5, 0;\n"
      "@valid st.global.v4.u32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(pointer),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(static_cast<unsigned>(valid))
      : "memory");
}
/// As store16_if(), 8 bytes.
__device__ __forceinline__ void store8_if(bool valid, void* pointer, uint2 words) {
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.u32 valid, %3, 0;\n"
      "@valid st.global.v2.u32 [%0], {%1, %2};\n}\n" ::"l"(pointer),
      "r"(words.x), "r"(words.y), "r"(static_cast<unsigned>(valid))
      : "memory");
}

/// Adds 1 to a word that another kernel reads by acquire_word(). A thread that acquires the new
/// number also sees all earlier writes of this thread, and all writes that other threads made
/// before a barrier which they and this thread have passed.
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
