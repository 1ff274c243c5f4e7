// Copies of low-rank factors in the dtype and the order of dimensions that products need.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// Copies factors (E, rows, columns) of any strides; `from` may be fp32, which is rounded. Along
/// the dimension with the larger stride `to` may have more elements than `from`: these become 0.
struct CopyFactors {
  static constexpr int kMost = 5;  ///< A and B of both projections, and B of the gate
  struct Copy {
    Tensor from;
    Tensor to;  ///< 16-bit
  };
  Copy copy[kMost];
  int count = 0;

  void add(const Tensor& from, const Tensor& to) { copy[count++] = {from, to}; }
};
void copy_factors(const CopyFactors& copies, cudaStream_t stream);

}  // namespace sonicmoe::cuda
