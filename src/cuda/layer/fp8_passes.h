// Forward and backward of Precision::kFp8 as lists of steps. Weight gradients, sums and biases are
// the steps of the 16-bit passes.
#pragma once

#include "cuda/layer/passes.h"

namespace sonicmoe::cuda {

/// Arrays in the scratch of forward, beside those of ForwardScratch.
struct Fp8ForwardScratch {
  ForwardScratch layer;  ///< `a` is unused
  Fp8Rows x;             ///< (T, d)
  Fp8Rows a;             ///< (C, n)
  std::int64_t bytes;
};
Fp8ForwardScratch fp8_forward_scratch(const Problem& problem, Pass pass, void* base);

/// Arrays in the scratch of backward, beside those of BackwardScratch.
struct Fp8BackwardScratch {
  BackwardScratch layer;
  Fp8Rows dout;  ///< (T, d)
  Fp8Rows dh;    ///< (C, G n)
  std::int64_t bytes;
};
Fp8BackwardScratch fp8_backward_scratch(const Problem& problem, const Engine& engine, void* base);

/// Bytes of H as forward keeps it.
std::int64_t fp8_h_bytes(const Problem& problem);
/// H in bf16 at `data`: (C, G, n), however the weights lie.
Tensor fp8_h_rows(const Problem& problem, void* data);

void add_fp8_forward_steps(const PassContext& pass, const ForwardArgs& args,
                           const Fp8ForwardScratch& scratch, Steps& steps);
void add_fp8_backward_steps(const PassContext& pass, const BackwardArgs& args,
                            const Fp8BackwardScratch& scratch, const Engine& engine, Steps& steps);

}  // namespace sonicmoe::cuda
