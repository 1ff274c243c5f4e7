// An engine on host memory, and the sums and lists of a pass, written as plainly as possible: the
// meaning of every field of a product. It needs no GPU.
#pragma once

#include "cuda/layer/passes.h"
#include "verify/implementation.h"

namespace sonicmoe::testing {

/// Serves compute capability 0.7, which no device has. dX~ comes after the weight gradients.
const cuda::Engine& stand_in_engine();

/// The same engine, but with dX~ before the weight gradients, and with the sums of dX at the same
/// time as both weight gradients.
const cuda::Engine& input_grad_first_engine();

/// The order in which run_on_host() computes steps that may run at the same time as the previous
/// step. An engine may finish either of the two steps first, so every order must give the same
/// results.
enum class Overlap {
  kNone,  ///< as listed
  kEven,  ///< swapped with the previous step if the previous step has an even index
  kOdd,   ///< swapped with the previous step if the previous step has an odd index
};

/// Computes the steps of a pass; throws if the hints of a product break their rules.
void run_on_host(const cuda::Steps& steps, const cuda::PassContext& pass,
                 const cuda::Engine& engine, Overlap overlap);

/// Forward and backward by `engine` as an implementation that the harness can judge.
verify::Implementation implementation_of(const cuda::Engine& engine, Overlap overlap);

}  // namespace sonicmoe::testing
