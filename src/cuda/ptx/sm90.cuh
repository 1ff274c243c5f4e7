// Clusters and bulk copies for kernels that run on every GPU. Such a kernel uses them if kHasSm90,
// and has a plain form without them. A device may run either form. The host asks has_sm90()
// (cuda/device/launch.h), which is the kHasSm90 of the code that the device runs.
#pragma once

#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda::ptx {

/// Whether this compilation is for sm_90 or later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasSm90 = true;
#else
inline constexpr bool kHasSm90 = false;
#endif

/// A barrier of all threads of the cluster; each thread then sees the earlier writes of all. Plain
/// form: a cluster is one CTA.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

/// The array in the shared memory of CTA `rank` of the cluster, at the address that `own` has in
/// this CTA.
template <class T>
__device__ __forceinline__ const T* cluster_shared(T* own, unsigned rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return static_cast<const T*>(__cluster_map_shared_rank(own, rank));
#else
  return own;
#endif
}

}  // namespace sonicmoe::cuda::ptx
