// Tensor memory: its allocation, loads and stores of it, and the fences around accesses to it. An
// address is lane << 16 | column.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Allocates `columns` (a power of two from 32 to 512) in both CTAs of a pair, and writes their
/// address to shared memory at `slot`. The same warp of both CTAs calls it, with all lanes.
__device__ __forceinline__ void allocate_tensor_memory(std::uint32_t slot, std::uint32_t columns) {
  asm volatile(
      "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;\n"
      "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::"r"(slot),
      "r"(columns)
      : "memory");
}
/// Frees it, by the same warp of both CTAs.
__device__ __forceinline__ void free_tensor_memory(std::uint32_t address, std::uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns)
               : "memory");
}

/// Orders this thread's earlier accesses to tensor memory before what other threads do after they
/// have synchronised with it.
__device__ __forceinline__ void fence_before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
/// Orders what other threads did before they synchronised with this thread before its later
/// accesses to tensor memory.
__device__ __forceinline__ void fence_after_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

/// Loads 32 columns: lane i gets those of lane 32 (warp % 4) + i of tensor memory. All lanes give
/// the same address, that of the first of the warp's lanes. The wait is in the same statement, so
/// that the compiler cannot use a value before it.
__device__ __forceinline__ void load_tensor_memory(float (&v)[32], std::uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "
      "%30, %31}, [%32];\n"
      "tcgen05.wait::ld.sync.aligned;"
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]),
        "=f"(v[7]), "=f"(v[8]), "=f"(v[9]), "=f"(v[10]), "=f"(v[11]), "=f"(v[12]), "=f"(v[13]),
        "=f"(v[14]), "=f"(v[15]), "=f"(v[16]), "=f"(v[17]), "=f"(v[18]), "=f"(v[19]), "=f"(v[20]),
        "=f"(v[21]), "=f"(v[22]), "=f"(v[23]), "=f"(v[24]), "=f"(v[25]), "=f"(v[26]), "=f"(v[27]),
        "=f"(v[28]), "=f"(v[29]), "=f"(v[30]), "=f"(v[31])
      : "r"(address)
      : "memory");
}

/// The same for 8 columns.
__device__ __forceinline__ void load_tensor_memory(float (&v)[8], std::uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];\n"
      "tcgen05.wait::ld.sync.aligned;"
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]), "=f"(v[4]), "=f"(v[5]), "=f"(v[6]),
        "=f"(v[7])
      : "r"(address)
      : "memory");
}

/// Words instead of fp32, 16 columns.
__device__ __forceinline__ void load_tensor_memory(std::uint32_t (&v)[16], std::uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15}, [%16];\n"
      "tcgen05.wait::ld.sync.aligned;"
      : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]),
        "=r"(v[7]), "=r"(v[8]), "=r"(v[9]), "=r"(v[10]), "=r"(v[11]), "=r"(v[12]), "=r"(v[13]),
        "=r"(v[14]), "=r"(v[15])
      : "r"(address)
      : "memory");
}

/// Stores words to 16 columns, the reverse of a load. The wait is in the same statement, so that a
/// later load gets them.
__device__ __forceinline__ void store_tensor_memory(const std::uint32_t (&v)[16],
                                                    std::uint32_t address) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%16], {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, "
      "%11, %12, %13, %14, %15};\n"
      "tcgen05.wait::st.sync.aligned;" ::"r"(v[0]),
      "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(v[4]), "r"(v[5]), "r"(v[6]), "r"(v[7]), "r"(v[8]),
      "r"(v[9]), "r"(v[10]), "r"(v[11]), "r"(v[12]), "r"(v[13]), "r"(v[14]), "r"(v[15]),
      "r"(address)
      : "memory");
}
/// The same for 8 columns: the words of `first`, then those of `second`.
__device__ __forceinline__ void store_tensor_memory(const std::uint32_t (&first)[4],
                                                    const std::uint32_t (&second)[4],
                                                    std::uint32_t address) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x8.b32 [%8], {%0, %1, %2, %3, %4, %5, %6, %7};\n"
      "tcgen05.wait::st.sync.aligned;" ::"r"(first[0]),
      "r"(first[1]), "r"(first[2]), "r"(first[3]), "r"(second[0]), "r"(second[1]), "r"(second[2]),
      "r"(second[3]), "r"(address)
      : "memory");
}

}  // namespace sonicmoe::cuda::ptx
