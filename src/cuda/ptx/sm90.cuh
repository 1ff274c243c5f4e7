// Clusters and bulk copies, which kernels for every GPU use on sm_90 and later. A kernel asks
// kHasSm90 and has a plain form; the host asks has_sm90() of cuda/device/launch.h for the kernel's
// loaded code. Both say the same on every device, whichever code of the build it runs.
#pragma once

#include <cstdint>

#include "cuda/hopper/ptx/mbarrier.cuh"
#include "cuda/hopper/ptx/tma.cuh"

namespace sonicmoe::cuda::ptx {

/// Whether this compilation is for sm_90 or later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasSm90 = true;
#else
inline constexpr bool kHasSm90 = false;
#endif

/// All threads of the cluster meet; what they wrote before is visible to each other. Plain form: a
/// cluster is one CTA.
__device__ __forceinline__ void cluster_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

/// The array of shared memory that lies in CTA `rank` of the cluster where `own` lies in this one.
template <class T>
__device__ __forceinline__ const T* cluster_shared(T* own, unsigned rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return static_cast<const T*>(__cluster_map_shared_rank(own, rank));
#else
  return own;
#endif
}

}  // namespace sonicmoe::cuda::ptx
