// Copies by the TMA unit, and the fences between its accesses and ordinary accesses.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"

namespace sonicmoe::cuda::ptx {

/// Box coordinates, fastest dimension first.
struct Coord3 {
  std::int32_t x, y, z;
};
struct Coord4 {
  std::int32_t x, y, z, w;
};
struct Coord5 {
  /// The constructor makes Coord5 no aggregate: else three coordinates in braces, which mean a
  /// Coord3, would match Coord5 too.
  __device__ __forceinline__ Coord5(int x, int y, int z, int w, int v)
      : x(x), y(y), z(z), w(w), v(v) {}
  std::int32_t x, y, z, w, v;
};

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Starts the load of the box at `at` into shared memory of this CTA. `at` has as many coordinates
/// as the map has dimensions. `barrier` counts the bytes as they arrive (arrive_expecting()).
__device__ __forceinline__ void tma_load(std::uint32_t target, const CUtensorMap* map,
                                         Mbarrier barrier, Coord3 at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier.address()), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}

__device__ __forceinline__ void tma_load(std::uint32_t target, const CUtensorMap* map,
                                         Mbarrier barrier, Coord5 at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier.address()), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(at.v)
      : "memory");
}

/// As tma_load(), to the same shared address of every CTA in `mask`. Each CTA's own mbarrier at the
/// address of `barrier` counts the bytes.
__device__ __forceinline__ void tma_load_multicast(std::uint32_t target, const CUtensorMap* map,
                                                   Mbarrier barrier, Coord3 at,
                                                   std::uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(target),
      "l"(map), "r"(barrier.address()), "r"(at.x), "r"(at.y), "r"(at.z), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void tma_load_multicast(std::uint32_t target, const CUtensorMap* map,
                                                   Mbarrier barrier, Coord5 at,
                                                   std::uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(target),
      "l"(map), "r"(barrier.address()), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w), "r"(at.v),
      "h"(mask)
      : "memory");
}

/// Starts the store of a box from shared memory to `at`. Elements outside of the map are not
/// stored.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, std::uint32_t source, Coord3 at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(source), "r"(at.x), "r"(at.y), "r"(at.z)
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, std::uint32_t source, Coord4 at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(source), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.w)
      : "memory");
}
__device__ __forceinline__ void tma_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until the TMA has read the shared memory of this thread's committed stores.
__device__ __forceinline__ void tma_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Waits until this thread's committed stores are complete in global memory.
__device__ __forceinline__ void tma_wait_done() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// Orders ordinary and cp.async writes to shared memory before later reads by TMA and wgmma.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Orders ordinary accesses before later accesses by TMA, and accesses by TMA before later ordinary
/// accesses.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

/// Starts the load of `bytes` (a multiple of 16) into shared memory; `barrier` counts the bytes as
/// they arrive. Source and target are aligned to 16 bytes.
__device__ __forceinline__ void bulk_load(std::uint32_t target, const void* source,
                                          std::uint32_t bytes, Mbarrier barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(target),
      "l"(source), "r"(bytes), "r"(barrier.address())
      : "memory");
}

}  // namespace sonicmoe::cuda::ptx
