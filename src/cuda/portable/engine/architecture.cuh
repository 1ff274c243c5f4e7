// The compute capability that device code is compiled for.
#pragma once

namespace sonicmoe::cuda::portable {

/// As major * 10 + minor; 0 on the host.
#if defined(__CUDA_ARCH__)
inline constexpr int kArchitecture = __CUDA_ARCH__ / 10;
#else
inline constexpr int kArchitecture = 0;
#endif

}  // namespace sonicmoe::cuda::portable
