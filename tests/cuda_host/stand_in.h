// An engine on host memory, and the sums and lists of a pass, written as plainly as possible: the
// meaning of every field of a product. It needs no GPU.
#pragma once

#include "cuda/layer/passes.h"
#include "verify/implementation.h"

namespace sonicmoe::testing {

/// Serves compute capability 0.7, which no device has. dX~ comes after the weight gradients.
const cuda::Engine& stand_in_engine();

/// The same, with dX~ before the weight gradients and sums of dX beside both of them.
const cuda::Engine& input_grad_first_engine();

/// In which order run_on_host() computes steps that may run beside the step before them. An engine
/// may finish either of the two first, so every order must give the same results.
enum class Overlap {
  kNone,  ///< as listed
  kEven,  ///< swapped with the step before where that one has an even index
  kOdd,   ///< likewise, an odd index
};

/// Computes the steps of a pass; throws where the hints of a product break their rules.
void run_on_host(const cuda::Steps& steps, const cuda::PassContext& pass,
                 const cuda::Engine& engine, Overlap overlap);

/// Forward and backward by `engine` as an implementation that the harness can judge.
verify::Implementation implementation_of(const cuda::Engine& engine, Overlap overlap);

}  // namespace sonicmoe::testing
