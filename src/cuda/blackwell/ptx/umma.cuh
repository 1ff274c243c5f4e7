// Matrix products of a pair of CTAs: descriptors, products and their completion.
#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"

namespace sonicmoe::cuda::ptx {

/// Matrix descriptor of an operand of 16-bit elements in shared memory, with the 128-byte swizzle.
/// The layouts are those of wgmma:
///   K-major:  rows of 128 bytes (64 k); 8 rows = 1024 bytes; 16 k further = +32 bytes;
///   MN-major: groups of 64 mn x 64 k of 8192 bytes; 8 k = 1024 bytes; 16 k further = +2048 bytes.
/// Fields, in units of 16 bytes: start at bit 0, leading offset (between the groups) at 16, stride
/// offset at 32. Bits 46 to 48 are the version, 1; bits 61 to 63 the swizzle, 2.
__device__ __forceinline__ std::uint64_t matrix_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kFixed = std::uint64_t{8192 / 16} << 16 | std::uint64_t{1024 / 16} << 32 |
                                   std::uint64_t{1} << 46 | std::uint64_t{2} << 61;
  return kFixed | (address & 0x3ffff) >> 4;
}
/// What to add to it for 16 of K.
constexpr std::uint32_t next_16_of_k(bool mn_major) { return (mn_major ? 2048 : 32) / 16; }

/// Instruction descriptor of a product with D in fp32. `operands` has the types of A and B and
/// their orders (kBrainTypes and what follows it in params.h).
__device__ __forceinline__ std::uint32_t product_descriptor(std::uint32_t operands, int rows,
                                                            int columns) {
  return 1u << 4 | operands | static_cast<std::uint32_t>(columns) << 14 |
         static_cast<std::uint32_t>(rows) << 20;
}

/// Starts D = A B, or D += A B if `accumulates`, over 16 of K. One thread of the even CTA issues it
/// for both CTAs, whose operands are at equal addresses.
__device__ __forceinline__ void multiply_pair(std::uint32_t d, std::uint64_t a, std::uint64_t b,
                                              std::uint32_t descriptor, bool accumulates) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}\n" ::"r"(d),
      "l"(a), "l"(b), "r"(descriptor), "r"(static_cast<std::uint32_t>(accumulates))
      : "memory");
}

/// Descriptor of a chunk of scales for copy_scales_pair(): 32 rows of 16 bytes, without swizzle.
/// The stride offset between 8 rows is 128 bytes.
__device__ __forceinline__ std::uint64_t chunk_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kFixed = std::uint64_t{128 / 16} << 32 | std::uint64_t{1} << 46;
  return kFixed | (address & 0x3ffff) >> 4;
}
/// Copies a chunk of scales from each CTA's shared memory to four columns of its tensor memory. The
/// four bytes at (r % 32) * 16 + (r / 32) * 4 are those of row r: they go to lane r % 32 of each
/// quarter, column r / 32. Products that this thread issues later see the scales.
__device__ __forceinline__ void copy_scales_pair(std::uint32_t tensor, std::uint64_t chunk) {
  asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(tensor), "l"(chunk)
               : "memory");
}

/// Instruction descriptor of a product of e4m3 codes with scales of 8 exponent bits, which are byte
/// 0 of their columns.
__device__ __forceinline__ std::uint32_t code_product_descriptor(int rows, int columns) {
  return 1u << 23 | static_cast<std::uint32_t>(columns) << 14 |
         static_cast<std::uint32_t>(rows) << 20;
}
/// As multiply_pair(), over 32 codes of K, each times its scale. A column of tensor memory has the
/// scales of 32 rows of A in this CTA, or of 32 columns of B in both.
__device__ __forceinline__ void multiply_codes_pair(std::uint32_t d, std::uint64_t a,
                                                    std::uint64_t b, std::uint32_t descriptor,
                                                    std::uint32_t scales_a, std::uint32_t scales_b,
                                                    bool accumulates) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], "
      "p;\n}\n" ::"r"(d),
      "l"(a), "l"(b), "r"(descriptor), "r"(scales_a), "r"(scales_b),
      "r"(static_cast<std::uint32_t>(accumulates))
      : "memory");
}

/// Arrives once at `barrier` of both CTAs when all earlier products of this thread are complete.
__device__ __forceinline__ void commit_pair(Mbarrier barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
      "[%0], %1;" ::"r"(barrier.address()),
      "h"(static_cast<std::uint16_t>(3))
      : "memory");
}

/// Whether this thread is the one that the warp elects. All lanes call it.
__device__ __forceinline__ bool elect() {
  std::uint32_t is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(is));
  return is != 0;
}

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

}  // namespace sonicmoe::cuda::ptx
