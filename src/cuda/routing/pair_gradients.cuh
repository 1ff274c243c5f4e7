// Gradients of a list of pairs as a dense matrix.
#pragma once

#include "cuda/device/carver.h"
#include "cuda/routing/launch.cuh"
#include "sonicmoe/routing.h"

namespace sonicmoe::cuda {

/// Scratch of the gradients of pairs.
struct GradientScratch {
  float* dense;  // (T, E)
  std::int64_t bytes;
};

inline GradientScratch gradient_scratch(void* base, std::int64_t tokens, std::int64_t experts) {
  Carver<alignof(float)> carver(base);
  GradientScratch s{};
  s.dense = carver.take<float>(tokens * experts);
  s.bytes = carver.used();
  return s;
}

/// Fills `dense` (T, E) from dweight (C), zero where there is no pair.
void spread_gradients(const RouteParams& p, const Pairs& pairs, const Tensor& dweight, float* dense,
                      const Exec& exec);

}  // namespace sonicmoe::cuda
