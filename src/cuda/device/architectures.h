// The architectures for which the CUDA code of this build was compiled
// (SONICMOE_CUDA_ARCHITECTURES).
#pragma once

#include <span>

namespace sonicmoe::cuda {

/// Architectures, as major * 10 + minor, for which the kernels outside of the Hopper engine have
/// SASS. If 80 is among them, the build also has the PTX of these kernels for compute_80.
std::span<const int> architectures();

/// Whether a GPU of this compute capability runs code of `compiled`: SASS of the same major version
/// and no later minor one, or PTX of compute_80.
bool has_code(int capability, std::span<const int> compiled = architectures());

/// All code of the build: "sm_80 sm_90 compute_80 sm_90a".
const char* code_names();

}  // namespace sonicmoe::cuda
