// From words of two bf16 elements to e4m3 codes, by the rule of core/fp8_quantize.h.
#pragma once

#include "core/fp8_quantize.h"
#include "cuda/math/element.cuh"
#include "cuda/ptx/e4m3.cuh"

namespace sonicmoe::cuda {

/// The codes of a word's two elements; `inverse` is 1 / scale.
__device__ __forceinline__ std::uint32_t code_pair(std::uint32_t word, float inverse) {
  using Two = Pair<__nv_bfloat16>;
  // The conversion would saturate infinity to 448. 0 * infinity is NaN, so adding it gives the code
  // of NaN, and for finite values it adds 0.
  const float low = fmaf(Two::low(word), 0.0f, Two::low(word) * inverse);
  const float high = fmaf(Two::high(word), 0.0f, Two::high(word) * inverse);
  return ptx::to_e4m3(low, high);
}

/// The larger of `most` and of the magnitudes of a word's elements (fp8::magnitude_of).
__device__ __forceinline__ std::uint32_t larger_magnitude(std::uint32_t most, std::uint32_t word) {
  using Two = Pair<__nv_bfloat16>;
  most = max(most, fp8::magnitude_of(Two::low(word)));
  return max(most, fp8::magnitude_of(Two::high(word)));
}

}  // namespace sonicmoe::cuda
