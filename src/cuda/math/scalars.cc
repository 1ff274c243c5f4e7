#include "cuda/math/scalars.h"

#include <numbers>

namespace sonicmoe::cuda {

ActivationScalars scalars_of(const Activation& activation) {
  if (activation.kind != ActivationKind::kSwiGLUOai) return {};
  const double alpha = activation.alpha == 0.0 ? 1.702 : activation.alpha;
  return {static_cast<float>(alpha),
          activation.limit == 0.0 ? 7.0f : static_cast<float>(activation.limit),
          static_cast<float>(-alpha * std::numbers::log2e)};
}

}  // namespace sonicmoe::cuda
