// The list of compiled kernels, by role. Host only; instances/ fills it.
#pragma once

#include <span>

#include "cuda/hopper/choices.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

enum class Role : int {
  kActivate = 0,             ///< gathered rows x W1, activation
  kStore = 1,                ///< rows in expert order x W2 (Y), W1 (dX~), any (grouped GEMM)
  kStoreScaled = 2,          ///< kStore, rows scaled by their weight
  kActivateGrad = 3,         ///< gathered rows x W2, derivative of the activation
  kStoreExpert = 4,          ///< gathered rows^T x rows, for every expert
  kGatheredStore = 5,        ///< gathered rows x weights, without an activation: the grouped GEMM
  kActivateInterleaved = 6,  ///< kActivate where gate and up alternate in W1 and H
  kActivateGradInterleaved = 7,  ///< kActivateGrad where they alternate in H
  kGatheredStoreScaled = 8,      ///< kGatheredStore, rows scaled by a number
};

/// Kernels of roles without an activation are listed under this activation.
inline constexpr ActivationKind kNoActivation = ActivationKind::kSwiGLU;

struct KernelKey {
  Role role;
  DType dtype;  ///< kBF16 or kF16
  TileId tile;
  Major b;  ///< contiguous dimension of the weights; kStoreExpert: of the output
  ActivationKind activation;
  bool operator==(const KernelKey&) const = default;
};

struct KernelEntry {
  KernelKey key;
  const void* function;
};

/// Every kernel of the build (generated).
std::span<const KernelEntry> kernel_list();

}  // namespace sonicmoe::cuda
