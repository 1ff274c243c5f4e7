// The products of the probe whose operands are codes with scales, one or two for each kernel of
// Precision::kFp8.
#pragma once

#include <span>
#include <string>

#include "cuda/blackwell/probe_trial.h"

namespace sonicmoe::cuda::blackwell::probed {

struct CodesTrial {
  Trial trial;
  /// What is wrong with the product; empty: nothing.
  std::string (*fault)(const Device& device, const Trial& trial);
};

std::span<const CodesTrial> codes_trials();

}  // namespace sonicmoe::cuda::blackwell::probed
