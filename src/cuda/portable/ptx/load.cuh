// What packed weights need besides copies: loads that the compiler does not move past other
// volatile statements, groups of copies, stores that may be left out, and prmt.
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

/// A byte of shared memory.
__device__ __forceinline__ std::uint8_t load_byte(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return static_cast<std::uint8_t>(value);
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

/// Stores 16 bytes to shared memory if `stores` is not zero.
__device__ __forceinline__ void store_shared16_if(std::uint32_t stores, std::uint32_t address,
                                                  const uint4& v) {
  asm volatile(
      "{\n.reg .pred stores;\nsetp.ne.u32 stores, %5, 0;\n"
      "@stores st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n}\n" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(stores)
      : "memory");
}

/// `value`. The compiler does not move what is computed from it to another place.
__device__ __forceinline__ std::uint32_t computed_here(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
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
