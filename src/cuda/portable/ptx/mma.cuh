// mma.sync, and the transposed load of its fragments (sm_80 and later).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sonicmoe::cuda::ptx {

/// Four 8x8 matrices of 16-bit elements, each transposed; lane i gives the address of row i % 8 of
/// matrix i / 8.
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&m)[4],
                                                         std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

/// acc (16 x 8, fp32) += a (16 x 16) * b (16 x 8).
template <class Element>
__device__ __forceinline__ void multiply_add(float (&acc)[4], const std::uint32_t (&a)[4],
                                             const std::uint32_t* b);

template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&acc)[4],
                                                            const std::uint32_t (&a)[4],
                                                            const std::uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void multiply_add<__half>(float (&acc)[4], const std::uint32_t (&a)[4],
                                                     const std::uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace sonicmoe::cuda::ptx
