// Sums and prefix sums over a block of threads.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda {

/// Replaces each of kCount values by its exclusive prefix sum over kThreads threads; totals[]
/// receives the sums. Ends with a barrier, so that calls may follow each other.
template <int kThreads, int kCount>
__device__ void block_prefix(int (&values)[kCount], int (&totals)[kCount]) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32);
  __shared__ int warps[kCount][kWarps];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    sums[i] = values[i];
    for (int d = 1; d < 32; d *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, sums[i], d);
      if (lane >= d) sums[i] += below;
    }
    if (lane == 31) warps[i][warp] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    const int mine = lane < kWarps ? warps[i][lane] : 0;
    totals[i] = __reduce_add_sync(0xffffffffu, mine);
    const int before = __reduce_add_sync(0xffffffffu, lane < warp ? mine : 0);
    values[i] = before + sums[i] - values[i];
  }
  __syncthreads();
}

/// The same for one value; returns the prefix sum.
template <int kThreads>
__device__ int block_prefix(int value, int* total) {
  int values[1] = {value};
  int totals[1];
  block_prefix<kThreads>(values, totals);
  *total = totals[0];
  return values[0];
}

/// The sum over kThreads threads, added in a fixed order, in every thread.
template <int kThreads, class T>
__device__ T block_sum(T value) {
  constexpr int kWarps = kThreads / 32;
  __shared__ T warps[kWarps];
  for (int d = 16; d > 0; d /= 2) value += __shfl_xor_sync(0xffffffffu, value, d);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  T sum = 0;
  for (int w = 0; w < kWarps; w++) sum += warps[w];
  __syncthreads();
  return sum;
}

}  // namespace sonicmoe::cuda
