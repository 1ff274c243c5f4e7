// The list of compiled FP8 kernels. Host only; instances/ fills it.
#pragma once

#include <span>

#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

enum class Fp8Role : int {
  kActivate = 0,                ///< gathered rows x W1, activation
  kStore = 1,                   ///< rows x W2 (Y) or x W1 (dX~)
  kActivateGradOfCodes = 2,     ///< gathered rows x W2, gradient of the activation; H in codes
  kActivateGradOfElements = 3,  ///< as kActivateGradOfCodes, with H in bf16
};

struct Fp8KernelEntry {
  Fp8Role role;
  ActivationKind activation;  ///< kSwiGLU if the role has no activation
  const void* function;
};

/// Every FP8 kernel of the build (generated).
std::span<const Fp8KernelEntry> fp8_kernel_list();

}  // namespace sonicmoe::cuda
