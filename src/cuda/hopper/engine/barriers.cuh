// Every barrier of the kernel, and the accesses that it orders.
//
// mbarriers, in shared memory (Cta in pipeline.cuh has a function for each name):
//
//   name             arrivals per phase             who waits          what it orders
//   full[stage]      1 with the TMA's bytes, and    consumers          loads of a stage before
//                    1 per thread that copies                          the wgmma that read it
//                    by cp.async (kCopyArrivals)
//   empty[stage]     1 per consuming warp,          the producer       reads of a stage before
//                    in both CTAs of a cluster                         its next loads
//   queue_full[i]    1 with the 4 bytes of          queue readers      the store of a tile index
//                    st.async                                          before its reads
//   queue_empty[i]   1 per queue reader, in both    the scheduler      all reads of an index
//                    CTAs; only the barrier of      thread             before the store of the
//                    the first CTA is used                             next index in this entry
//
// FP8 kernels have two kinds more: card_full (fp8/tile_cards.cuh), and one for each consumer warp's
// input in Fp8ActivateGrad.
//
// Named barriers (bar.sync, bar.arrive): NamedBarrier. The cluster barrier runs twice: after the
// mbarriers are initialised, and before a CTA exits, because the other CTA of the cluster may still
// multicast into its stages and arrive at its mbarriers.
#pragma once

#include "cuda/hopper/engine/shape.h"
#include "cuda/ptx/barrier.cuh"

namespace sonicmoe::cuda {

/// Ids of bar.sync. Id 0 is __syncthreads(). Warpgroups here are the two consumer warpgroups.
enum class NamedBarrier : int {
  kStaging0 = 1,      ///< warpgroup 0: its writes to boxes, bias and scales before their reads
  kStaging1 = 2,      ///< the same for warpgroup 1
  kProducts0 = 3,     ///< ping-pong: warpgroup 1 has issued its tile's products, 0 may begin
  kProducts1 = 4,     ///< ping-pong: warpgroup 0 has issued its tile's products, 1 may begin
  kTail = 5,          ///< both: the rows of B past the expert are zero before wgmma reads them
  kOffset = 5,        ///< FP8, which has no kTail: warpgroup 0 has multiplied unit 0, 1 may begin
  kEarlyRelease = 6,  ///< both: all their stores are in memory before one thread counts the CTA
};

/// The barrier of `warpgroup`; `first` is the barrier of warpgroup 0.
__device__ __forceinline__ NamedBarrier of_warpgroup(NamedBarrier first, int warpgroup) {
  return static_cast<NamedBarrier>(static_cast<int>(first) + warpgroup);
}

/// `threads`: the number of threads that sync plus the number that only arrive.
__device__ __forceinline__ void sync(NamedBarrier barrier, int threads) {
  ptx::named_sync(static_cast<int>(barrier), threads);
}
__device__ __forceinline__ void arrive(NamedBarrier barrier, int threads) {
  ptx::named_arrive(static_cast<int>(barrier), threads);
}

}  // namespace sonicmoe::cuda
