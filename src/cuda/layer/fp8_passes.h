// Forward and backward of Precision::kFp8 as lists of steps. A, Y, dH and dX~ are fp8 products, and
// X and dO are quantised before them. All other steps are those of the 16-bit passes.
#pragma once

#include "cuda/layer/passes.h"

namespace sonicmoe::cuda {

/// Arrays in the scratch of forward: those of ForwardScratch, and quantised rows.
struct Fp8ForwardScratch {
  ForwardScratch layer;  ///< `a` is unused
  Fp8Rows x;             ///< (T, d), q(X)
  Fp8Rows a;             ///< (C, n), q(A)
  std::int64_t bytes;
};
Fp8ForwardScratch fp8_forward_scratch(const Problem& problem, Pass pass, void* base);

/// Arrays in the scratch of backward: those of BackwardScratch, and quantised rows.
struct Fp8BackwardScratch {
  BackwardScratch layer;
  Fp8Rows dout;  ///< (T, d), q(dO)
  Fp8Rows dh;    ///< (C, G n), q(dH)
  std::int64_t bytes;
};
Fp8BackwardScratch fp8_backward_scratch(const Problem& problem, const Engine& engine, void* base);

/// Bytes of the kept H: codes and scales, or bf16 (Problem::kept_h).
std::int64_t fp8_h_bytes(const Problem& problem);
/// A view of H kept in bf16 at `data`: (C, G, n), whatever the layout of the weights.
Tensor fp8_h_rows(const Problem& problem, void* data);

void add_fp8_forward_steps(const PassContext& pass, const ForwardArgs& args,
                           const Fp8ForwardScratch& scratch, Steps& steps);
void add_fp8_backward_steps(const PassContext& pass, const BackwardArgs& args,
                            const Fp8BackwardScratch& scratch, const Engine& engine, Steps& steps);

}  // namespace sonicmoe::cuda
