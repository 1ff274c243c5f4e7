// cp.async: copies from global to shared memory by ordinary threads.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Copies 16 bytes, bypassing L1. If `valid` is zero, it writes zeros to the target and does not
/// read the source.
__device__ __forceinline__ void copy16(std::uint32_t target, const void* source,
                                       std::uint32_t valid) {
  asm volatile(
      "{\n.reg .pred absent;\nsetp.eq.u32 absent, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, absent;\n}\n" ::"r"(target),
      "l"(source), "r"(valid)
      : "memory");
}

/// As copy16(), from byte 16 * `unit` of `source`. A caller that keeps units between copies needs
/// one register for each; addresses would need two.
__device__ __forceinline__ void copy_unit(std::uint32_t target, const void* source,
                                          std::uint32_t unit, std::uint32_t valid) {
  asm volatile(
      "{\n.reg .pred absent;\n.reg .b64 from;\nsetp.eq.u32 absent, %3, 0;\n"
      "mad.wide.u32 from, %2, 16, %1;\n"
      "cp.async.cg.shared.global [%0], [from], 16, absent;\n}\n" ::"r"(target),
      "l"(source), "r"(unit), "r"(valid)
      : "memory");
}

/// Copies 4 bytes.
__device__ __forceinline__ void copy4(std::uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}
/// Waits until all cp.async copies of this thread are in shared memory.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace sonicmoe::cuda::ptx
