#include "cuda/math/scalars.h"

#include <cmath>
#include <numbers>

namespace sonicmoe::cuda {
namespace {

// The positive x with silu(x) = limit: the root of x - limit (1 + e^-x) by Newton's method. The
// function is concave and ascends, so from x = limit, which is below the root, the steps ascend to
// it.
double inverse_silu(double limit) {
  double x = limit;
  for (int step = 0; step < 50; ++step) {
    const double tail = limit * std::exp(-x);
    const double next = x - (x - limit - tail) / (1.0 + tail);
    if (!(next > x)) break;
    x = next;
  }
  return x;
}

}  // namespace

ActivationScalars scalars_of(const Activation& activation) {
  const Activation full = with_defaults(activation);
  const auto scalars = [](double alpha, double limit, double power) {
    return ActivationScalars{static_cast<float>(alpha), static_cast<float>(limit),
                             static_cast<float>(power)};
  };
  switch (full.kind) {
    case ActivationKind::kSwiGLUOai:
      return scalars(full.alpha, full.limit, -full.alpha * std::numbers::log2e);
    case ActivationKind::kSwiGLUClamped:
      return scalars(full.limit, full.limit, 0.0);
    case ActivationKind::kSwiGLUStep:
      return scalars(inverse_silu(full.limit), full.limit, 0.0);
    case ActivationKind::kSiTU:
      return scalars(2.0 * std::numbers::log2e / full.alpha, 2.0 * std::numbers::log2e / full.limit,
                     full.alpha * full.limit);
    default:
      return {};
  }
}

}  // namespace sonicmoe::cuda
