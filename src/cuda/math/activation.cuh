// The activations and their derivatives on single fp32 values, which were rounded to H's dtype
// before (docs/method.md has the formulas). docs/architecture.md, "Adding things", says how to add
// an activation.
#pragma once

#include <cuda_runtime.h>

#include "cuda/math/layouts.h"
#include "cuda/math/scalars.h"
#include "cuda/ptx/math.cuh"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

inline constexpr float kLog2E = 1.4426950409f;

/// 1 / (1 + 2^x) = sigmoid(-x / kLog2E), to about 2 ulp of fp32; 0 for x above 126.
__device__ __forceinline__ float sigmoid_of_power(float x) {
  return ptx::reciprocal(1.0f + ptx::exp2(x));
}

/// The result of slope(x, g). `value` is f(x), with the same bits as value(x) gives in forward;
/// `times` is f'(x) g.
struct Slope {
  float value;
  float times;
};

// Functions f of one value: an activation without a gate, or the function of the gate in Gated
// below.
// - slope() writes the product f g exactly as Gated::gradient() does, so that the compiler computes
//   it once.
// - Where a product is added to a value, the code says explicitly whether to use fmaf or two
//   operations. If the compiler chose, value() and slope() could round differently, and backward
//   would compute another A than forward stored.

struct Silu {
  static __device__ __forceinline__ float sigmoid(float x) { return sigmoid_of_power(-kLog2E * x); }
  static __device__ __forceinline__ float value(float x) { return x * sigmoid(x); }
  static __device__ __forceinline__ Slope slope(float x, float g) {
    const float s = sigmoid(x);
    const float f = x * s;
    return {f, fmaf(s, g, fmaf(-(f * g), s, f * g))};
  }
};

/// x Phi(x), with Phi by the rational-exponential form of Abramowitz and Stegun 7.1.26. The
/// absolute error of Phi is about 3e-7. Its relative error is below 5e-4 for x > -4 and below 4e-3
/// for x > -6. normcdff would branch.
struct GeluErf {
  static __device__ __forceinline__ float distribution(float x, float bell) {
    const float t = ptx::reciprocal(fmaf(0.3275911f * 0.70710678f, fabsf(x), 1.0f));
    float p = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
    p = fmaf(t, p, 0.5f * 1.421413741f);
    p = fmaf(t, p, 0.5f * -0.284496736f);
    p = fmaf(t, p, 0.5f * 0.254829592f);
    const float tail = t * p * bell;
    return x < 0.0f ? tail : __fadd_rn(1.0f, -tail);
  }
  static __device__ __forceinline__ float bell(float x) {
    return ptx::exp2(-0.5f * kLog2E * x * x);
  }
  static __device__ __forceinline__ float value(float x) { return x * distribution(x, bell(x)); }
  static __device__ __forceinline__ Slope slope(float x, float g) {
    constexpr float kInverseRootTwoPi = 0.3989422804f;
    const float b = bell(x);
    const float d = distribution(x, b);
    return {x * d, fmaf(x * kInverseRootTwoPi, b, d) * g};
  }
};

/// x (1 + tanh(z)) / 2, computed as x sigmoid(2z): 1 + tanh(z) would cancel in the negative tail.
struct GeluTanh {
  static constexpr float kTwoRootTwoOverPi = 1.5957691216f;
  static constexpr float kCubic = 0.044715f;
  static __device__ __forceinline__ float sigmoid(float x) {
    constexpr float kRate = -kLog2E * kTwoRootTwoOverPi;
    return sigmoid_of_power(x * fmaf(kRate * kCubic, x * x, kRate));
  }
  static __device__ __forceinline__ float value(float x) { return x * sigmoid(x); }
  static __device__ __forceinline__ Slope slope(float x, float g) {
    const float s = sigmoid(x);
    const float f = x * s;
    const float inner = fmaf(3.0f * kCubic * kTwoRootTwoOverPi, x * x, kTwoRootTwoOverPi);
    return {f, fmaf(inner, fmaf(-(f * g), s, f * g), s * g)};
  }
};

/// value() keeps NaN; the derivatives at 0 and at NaN are 0.
struct Relu {
  static __device__ __forceinline__ float value(float x) { return x < 0.0f ? 0.0f : x; }
  static __device__ __forceinline__ Slope slope(float x, float g) {
    return {value(x), x > 0.0f ? g : 0.0f};
  }
};

/// The derivative keeps NaN too: it is 2 x for every x that is not below 0.
struct Relu2 {
  static __device__ __forceinline__ float value(float x) { return x < 0.0f ? 0.0f : x * x; }
  static __device__ __forceinline__ Slope slope(float x, float g) {
    return {value(x), x <= 0.0f ? 0.0f : 2.0f * x * g};
  }
};

/// The result of gradient(): act(H), and g times the derivatives of act by gate and by up. Without
/// a gate, by_gate is the derivative by H and by_up is 0.
struct Gradient {
  float value;
  float by_gate;
  float by_up;
};

/// f(gate) * up.
template <class Function>
struct Gated {
  static __device__ __forceinline__ float value(float gate, float up, const ActivationScalars&) {
    return Function::value(gate) * up;
  }
  static __device__ __forceinline__ Gradient gradient(float gate, float up, float g,
                                                      const ActivationScalars&) {
    const Slope slope = Function::slope(gate, g);
    return {slope.value * up, slope.times * up, slope.value * g};
  }
};

/// x sigmoid(alpha x) (u + 1), with x = min(gate, limit) and u = up clamped to [-limit, limit].
struct GatedOai {
  static __device__ __forceinline__ float value(float gate, float up, const ActivationScalars& c) {
    const float x = ptx::smaller(gate, c.limit);
    const float u = ptx::smaller(ptx::larger(up, -c.limit), c.limit);
    return x * sigmoid(x, c) * (u + 1.0f);
  }
  /// If a value equals its limit, the clamp passes the gradient.
  static __device__ __forceinline__ Gradient gradient(float gate, float up, float g,
                                                      const ActivationScalars& c) {
    const float x = ptx::smaller(gate, c.limit);
    const float u = ptx::smaller(ptx::larger(up, -c.limit), c.limit);
    const float s = sigmoid(x, c);
    const float f = x * s;
    const float slope = fmaf(c.alpha, fmaf(-(f * g), s, f * g), s * g);
    return {f * (u + 1.0f), gate > c.limit ? 0.0f : slope * (u + 1.0f),
            fabsf(up) > c.limit ? 0.0f : f * g};
  }

 private:
  static __device__ __forceinline__ float sigmoid(float x, const ActivationScalars& c) {
    return sigmoid_of_power(c.power * x);
  }
};

/// silu(x) u, with x = min(gate, alpha) and u = up clamped to [-limit, limit].
struct GatedClamped {
  static __device__ __forceinline__ float value(float gate, float up, const ActivationScalars& c) {
    const float u = ptx::smaller(ptx::larger(up, -c.limit), c.limit);
    return Silu::value(ptx::smaller(gate, c.alpha)) * u;
  }
  /// If a value equals its limit, the clamp passes the gradient.
  static __device__ __forceinline__ Gradient gradient(float gate, float up, float g,
                                                      const ActivationScalars& c) {
    const float u = ptx::smaller(ptx::larger(up, -c.limit), c.limit);
    const Slope slope = Silu::slope(ptx::smaller(gate, c.alpha), g);
    return {slope.value * u, gate > c.alpha ? 0.0f : slope.times * u,
            fabsf(up) > c.limit ? 0.0f : slope.value * g};
  }
};

/// tanh(z) and its derivative 1 - tanh(z)^2.
struct Tanh {
  float value;
  float slope;

  /// At z = y ln 2 / 2. With e = 2^-|y| = e^-2|z|, tanh(|z|) is (1 - e) / (1 + e), and the
  /// derivative 4 e / (1 + e)^2 keeps its relative accuracy where tanh is near 1. For |y| < 1,
  /// where 1 - e would cancel, tanh is an odd polynomial (relative error 7e-8).
  static __device__ __forceinline__ Tanh at(float y) {
    const float e = ptx::exp2(-fabsf(y));
    const float r = ptx::reciprocal(1.0f + e);
    const float square = y * y;
    float p = fmaf(square, -2.945385174e-5f, 6.648642691e-4f);
    p = fmaf(square, p, -1.387566668e-2f);
    p = fmaf(square, p, 3.465735790e-1f);
    const float large = copysignf((1.0f - e) * r, y);
    return {fabsf(y) < 1.0f ? y * p : large, 4.0f * e * r * r};
  }
};

/// c_g tanh(gate / c_g) sigmoid(gate) c_u tanh(up / c_u), with the caps c_g and c_u.
/// ActivationScalars has 2 / (c_g ln 2), 2 / (c_u ln 2) and c_g c_u, of which c_g and c_u are
/// products.
struct GatedCapped {
  static __device__ __forceinline__ float value(float gate, float up, const ActivationScalars& c) {
    return Tanh::at(gate * c.alpha).value * Silu::sigmoid(gate) * Tanh::at(up * c.limit).value *
           c.power;
  }
  static __device__ __forceinline__ Gradient gradient(float gate, float up, float g,
                                                      const ActivationScalars& c) {
    constexpr float kHalfLn2 = 0.34657359f;
    const float cap_gate = kHalfLn2 * c.limit * c.power;
    const float cap_up = kHalfLn2 * c.alpha * c.power;
    const Tanh t = Tanh::at(gate * c.alpha);
    const Tanh u = Tanh::at(up * c.limit);
    const float s = Silu::sigmoid(gate);
    const float f = t.value * s;
    const float slope = fmaf(cap_gate * t.value, 1.0f - s, t.slope);
    return {f * u.value * c.power, slope * s * (cap_up * u.value) * g,
            f * u.slope * (cap_gate * g)};
  }
};

/// f(x), without a gate.
template <class Function>
struct Plain {
  static __device__ __forceinline__ float value(float x) { return Function::value(x); }
  static __device__ __forceinline__ Gradient gradient(float x, float g) {
    const Slope slope = Function::slope(x, g);
    return {slope.value, slope.times, 0.0f};
  }
};

template <ActivationKind kKind>
struct ActivationOf;
template <>
struct ActivationOf<ActivationKind::kSwiGLU> : Gated<Silu> {};
template <>
struct ActivationOf<ActivationKind::kSwiGLUOai> : GatedOai {};
template <>
struct ActivationOf<ActivationKind::kGeGLU> : Gated<GeluErf> {};
template <>
struct ActivationOf<ActivationKind::kGeGLUTanh> : Gated<GeluTanh> {};
template <>
struct ActivationOf<ActivationKind::kReGLU> : Gated<Relu> {};
template <>
struct ActivationOf<ActivationKind::kSiLU> : Plain<Silu> {};
template <>
struct ActivationOf<ActivationKind::kGELU> : Plain<GeluErf> {};
template <>
struct ActivationOf<ActivationKind::kGELUTanh> : Plain<GeluTanh> {};
template <>
struct ActivationOf<ActivationKind::kReLU> : Plain<Relu> {};
template <>
struct ActivationOf<ActivationKind::kReLU2> : Plain<Relu2> {};
template <>
struct ActivationOf<ActivationKind::kSwiGLUClamped> : GatedClamped {};
template <>
struct ActivationOf<ActivationKind::kSiTU> : GatedCapped {};

}  // namespace sonicmoe::cuda
