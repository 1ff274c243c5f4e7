// Sums and prefix sums over a block of threads.
#pragma once

#include <cstdint>

namespace sonicmoe::cuda {

/// Exclusive prefix sum over kThreads threads; *total receives the sum. Ends with a barrier, so
/// that calls may follow each other.
template <int kThreads>
__device__ int block_prefix(int value, int* total) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kWarps <= 32);
  __shared__ int warps[kWarps];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int sum = value;
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, sum, d);
    if (lane >= d) sum += below;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  const int mine = lane < kWarps ? warps[lane] : 0;
  *total = __reduce_add_sync(0xffffffffu, mine);
  const int before = __reduce_add_sync(0xffffffffu, lane < warp ? mine : 0);
  __syncthreads();
  return before + sum - value;
}

/// Sum over kThreads threads in a fixed order, for every thread.
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
