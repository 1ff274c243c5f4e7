// What packed weights need besides copies: loads that the compiler does not move past other
// volatile statements, groups of copies, and prmt.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// 4 bytes of global memory. If `valid` is zero, it reads nothing and returns zero.
__device__ __forceinline__ std::uint32_t load4(const void* source, std::uint32_t valid) {
  std::uint32_t v;
  asm volatile(
      "{\n.reg .pred present;\nsetp.ne.u32 present, %2, 0;\nmov.u32 %0, 0;\n"
      "@present ld.global.u32 %0, [%1];\n}\n"
      : "=&r"(v)
      : "l"(source), "r"(valid));
  return v;
}

/// The same for one byte.
__device__ __forceinline__ std::uint32_t load1(const void* source, std::uint32_t valid) {
  std::uint32_t v;
  asm volatile(
      "{\n.reg .pred present;\nsetp.ne.u32 present, %2, 0;\nmov.u32 %0, 0;\n"
      "@present ld.global.u8 %0, [%1];\n}\n"
      : "=&r"(v)
      : "l"(source), "r"(valid));
  return v;
}

/// Makes a group of this thread's cp.async copies since the last group.
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until all groups of this thread are in shared memory; copies after the last group may
/// still be on their way.
__device__ __forceinline__ void groups_wait() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}

/// Four bytes of the eight bytes of low (0 to 3) and high (4 to 7): byte i of the result is that
/// with the number in hexadecimal digit i of `which`, a number below 8. __byte_perm() would clear
/// bit 3 of each digit.
__device__ __forceinline__ std::uint32_t select_bytes(std::uint32_t low, std::uint32_t high,
                                                      std::uint32_t which) {
  std::uint32_t v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(low), "r"(high), "r"(which));
  return v;
}

}  // namespace sonicmoe::cuda::ptx
