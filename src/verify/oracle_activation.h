// Every activation with its exact derivatives; no other file of the oracle has these formulas.
// docs/method.md derives them. At kinks as in torch 2.13: clamp passes its gradient at equality,
// relu'(0) = 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "sonicmoe/types.h"

namespace sonicmoe::oracle {

/// act(gate, up) and its partial derivatives. Activations without a gate act on `up` alone.
template <class Real>
struct Activated {
  Real value;
  Real by_gate;
  Real by_up;
};

/// f(x) and f'(x).
template <class Real>
struct Slope {
  Real value;
  Real derivative;
};

template <class Real>
Real sigmoid(Real x) {
  return Real(1) / (Real(1) + std::exp(-x));
}

template <class Real>
Slope<Real> silu(Real x) {
  const Real s = sigmoid(x);
  return {x * s, s * (Real(1) + x * (Real(1) - s))};
}

/// x * Phi(x), Phi the normal distribution: f' = Phi(x) + x * phi(x).
template <class Real>
Slope<Real> gelu(Real x) {
  const Real half_square_root = Real(0.70710678118654752440084436210484904L);  // sqrt(1/2)
  const Real density_at_zero = Real(0.398942280401432677939946059934381868L);  // 1/sqrt(2 pi)
  const Real distribution = Real(0.5) * (Real(1) + std::erf(x * half_square_root));
  const Real density = density_at_zero * std::exp(Real(-0.5) * x * x);
  return {x * distribution, distribution + x * density};
}

/// x/2 * (1 + tanh(c (x + 0.044715 x^3))), c = sqrt(2/pi).
template <class Real>
Slope<Real> gelu_tanh(Real x) {
  const Real c = Real(0.797884560802865355879892119868763737L);
  const Real cubic = Real(0.044715L);
  const Real t = std::tanh(c * (x + cubic * x * x * x));
  const Real inner = c * (Real(1) + Real(3) * cubic * x * x);
  return {Real(0.5) * x * (Real(1) + t),
          Real(0.5) * (Real(1) + t) + Real(0.5) * x * (Real(1) - t * t) * inner};
}

// NaN stays NaN, as in both backends.
template <class Real>
Slope<Real> relu(Real x) {
  return {x <= Real(0) ? Real(0) : x, x > Real(0) ? Real(1) : Real(0)};
}

template <class Real>
Slope<Real> relu2(Real x) {
  const Real positive = relu(x).value;
  return {positive * positive, Real(2) * positive};
}

/// g' sigmoid(alpha g') (u' + 1) with g' = min(gate, limit), u' = clamp(up, -limit, limit).
template <class Real>
Activated<Real> swiglu_oai(const Activation& activation, Real gate, Real up) {
  const Real alpha = static_cast<Real>(activation.alpha != 0.0 ? activation.alpha : 1.702);
  const Real limit = static_cast<Real>(activation.limit != 0.0 ? activation.limit : 7.0);
  const Real g = std::min(gate, limit);
  const Real u = std::clamp(up, -limit, limit);
  const Real s = sigmoid(alpha * g);
  const Real gate_passes = gate <= limit ? Real(1) : Real(0);
  const Real up_passes = up >= -limit && up <= limit ? Real(1) : Real(0);
  return {g * s * (u + Real(1)),
          gate_passes * (u + Real(1)) * s * (Real(1) + alpha * g * (Real(1) - s)),
          up_passes * g * s};
}

/// silu(g') u' with g' = min(gate, limit), u' = clamp(up, -limit, limit).
template <class Real>
Activated<Real> swiglu_clamped(const Activation& activation, Real gate, Real up) {
  const Real limit = static_cast<Real>(activation.limit != 0.0 ? activation.limit : 10.0);
  const Slope<Real> f = silu(std::min(gate, limit));
  const Real u = std::clamp(up, -limit, limit);
  const Real gate_passes = gate <= limit ? Real(1) : Real(0);
  const Real up_passes = up >= -limit && up <= limit ? Real(1) : Real(0);
  return {f.value * u, gate_passes * f.derivative * u, up_passes * f.value};
}

/// min(silu(gate), limit) u' with u' = clamp(up, -limit, limit).
template <class Real>
Activated<Real> swiglu_step(const Activation& activation, Real gate, Real up) {
  const Real limit = static_cast<Real>(activation.limit != 0.0 ? activation.limit : 7.0);
  const Slope<Real> f = silu(gate);
  const Real value = std::min(f.value, limit);
  const Real u = std::clamp(up, -limit, limit);
  const Real gate_passes = f.value <= limit ? Real(1) : Real(0);
  const Real up_passes = up >= -limit && up <= limit ? Real(1) : Real(0);
  return {value * u, gate_passes * f.derivative * u, up_passes * value};
}

/// cap * tanh(x / cap).
template <class Real>
Slope<Real> capped(Real x, Real cap) {
  const Real cosine = std::cosh(x / cap);
  return {cap * std::tanh(x / cap), Real(1) / (cosine * cosine)};
}

/// capped(gate) sigmoid(gate) capped(up), with the caps alpha and limit.
template <class Real>
Activated<Real> situ(const Activation& activation, Real gate, Real up) {
  const Real cap_gate = static_cast<Real>(activation.alpha != 0.0 ? activation.alpha : 4.0);
  const Real cap_up = static_cast<Real>(activation.limit != 0.0 ? activation.limit : 25.0);
  const Slope<Real> g = capped(gate, cap_gate);
  const Slope<Real> u = capped(up, cap_up);
  const Real s = sigmoid(gate);
  return {g.value * s * u.value, (g.derivative * s + g.value * s * (Real(1) - s)) * u.value,
          g.value * s * u.derivative};
}

template <class Real>
Activated<Real> activate(const Activation& activation, Real gate, Real up) {
  const auto gated = [up](Slope<Real> f) {
    return Activated<Real>{f.value * up, f.derivative * up, f.value};
  };
  const auto plain = [](Slope<Real> f) { return Activated<Real>{f.value, Real(0), f.derivative}; };
  switch (activation.kind) {
    case ActivationKind::kSwiGLU:
      return gated(silu(gate));
    case ActivationKind::kSwiGLUOai:
      return swiglu_oai(activation, gate, up);
    case ActivationKind::kGeGLU:
      return gated(gelu(gate));
    case ActivationKind::kGeGLUTanh:
      return gated(gelu_tanh(gate));
    case ActivationKind::kReGLU:
      return gated(relu(gate));
    case ActivationKind::kSiLU:
      return plain(silu(up));
    case ActivationKind::kGELU:
      return plain(gelu(up));
    case ActivationKind::kGELUTanh:
      return plain(gelu_tanh(up));
    case ActivationKind::kReLU:
      return plain(relu(up));
    case ActivationKind::kReLU2:
      return plain(relu2(up));
    case ActivationKind::kSwiGLUClamped:
      return swiglu_clamped(activation, gate, up);
    case ActivationKind::kSiTU:
      return situ(activation, gate, up);
    case ActivationKind::kSwiGLUStep:
      return swiglu_step(activation, gate, up);
  }
  throw Error(Status::kInvalidArgument, "activation kind is out of range, must be 0 to " +
                                            std::to_string(kActivationCount - 1));
}

}  // namespace sonicmoe::oracle
