// Loads by TMA into this CTA whose bytes are counted by an mbarrier of the pair's even CTA.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda::ptx {

/// The address in the pair's even CTA of what has this address in this CTA.
__device__ __forceinline__ std::uint32_t in_even_cta(std::uint32_t address) {
  std::uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(address));
  return there;
}

/// One try of Mbarrier::wait(): false if the phase has not completed after a time that the GPU
/// chooses.
__device__ __forceinline__ bool try_wait(Mbarrier barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(barrier.address()), "r"(parity)
      : "memory");
  return done != 0;
}

/// Loads one box. `barrier` is an address of in_even_cta().
__device__ __forceinline__ void pair_load(std::uint32_t target, const CUtensorMap* map,
                                          std::uint32_t barrier, Coord3 at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
      "cta_group::2 [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}

/// Loads four rows, one after the other, from column x on. Rows outside of the tensor become zeros.
__device__ __forceinline__ void pair_gather(std::uint32_t target, const CUtensorMap* map,
                                            std::uint32_t barrier, int x, const int (&rows)[4]) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes."
      "cta_group::2 [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x), "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3])
      : "memory");
}

}  // namespace sonicmoe::cuda::ptx
