// How many blocks can run on a multiprocessor of the architecture for which this code is compiled.
#pragma once

namespace sonicmoe::cuda {

/// Threads that a multiprocessor runs at most.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || \
                               __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1100)
inline constexpr int kMultiprocessorThreads = 1536;
#else
inline constexpr int kMultiprocessorThreads = 2048;
#endif

/// `wanted` blocks, or fewer if a multiprocessor cannot run so many threads. For the second
/// argument of __launch_bounds__, which ptxas ignores if it is too large.
constexpr int resident_blocks(int wanted, int threads) {
  const int most = kMultiprocessorThreads / threads;
  return wanted < most ? wanted : most;
}

}  // namespace sonicmoe::cuda
