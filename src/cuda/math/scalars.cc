#include "cuda/math/scalars.h"

#include <numbers>

namespace sonicmoe::cuda {

ActivationScalars scalars_of(const Activation& activation) {
  const Activation full = with_defaults(activation);
  return {static_cast<float>(full.alpha), static_cast<float>(full.limit),
          static_cast<float>(-full.alpha * std::numbers::log2e)};
}

}  // namespace sonicmoe::cuda
