// The activations and their derivatives, in fp32 from rounded H (docs/method.md has the formulas).
// Adding one: a specialisation here and its twin in src/cpu/activation.
#pragma once

#include <cuda_runtime.h>

#include "cuda/ptx/math.cuh"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// How gate and up lie in H and dH: columns [gate | up], or alternating (the paired form).
enum class HLayout { kSplit, kPaired };

/// Constants of swiglu_oai; unused by the others.
struct ActivationScalars {
  float alpha;
  float limit;
};

/// To about 2 ulp of fp32, far below the rounding of a 16-bit result; 0 below -88.
__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kLog2E = 1.4426950409f;
  return ptx::reciprocal(1.0f + ptx::exp2(-kLog2E * x));
}

/// The function inside a gate (or alone), with its derivative.
struct Silu {
  static __device__ __forceinline__ float value(float x) { return x * sigmoid(x); }
  static __device__ __forceinline__ float slope(float x) {
    const float s = sigmoid(x);
    return fmaf(x * s, 1.0f - s, s);
  }
};

/// Phi(x) by the rational-exponential form of Abramowitz and Stegun 7.1.26: absolute error below
/// 1e-7, small relative error in the negative tail, and no branch, which normcdff has.
struct GeluErf {
  static __device__ __forceinline__ float distribution(float x, float bell) {
    const float t = ptx::reciprocal(fmaf(0.3275911f * 0.70710678f, fabsf(x), 1.0f));
    float p = fmaf(t, 1.061405429f, -1.453152027f);
    p = fmaf(t, p, 1.421413741f);
    p = fmaf(t, p, -0.284496736f);
    p = fmaf(t, p, 0.254829592f);
    const float tail = 0.5f * t * p * bell;
    return x < 0.0f ? tail : 1.0f - tail;
  }
  static __device__ __forceinline__ float bell(float x) {
    return ptx::exp2(-0.5f * 1.4426950409f * x * x);
  }
  static __device__ __forceinline__ float value(float x) { return x * distribution(x, bell(x)); }
  static __device__ __forceinline__ float slope(float x) {
    constexpr float kInverseRootTwoPi = 0.3989422804f;
    const float b = bell(x);
    return distribution(x, b) + x * kInverseRootTwoPi * b;
  }
};

/// (1 + tanh(z)) / 2 = sigmoid(2z), which keeps the small tail exact.
struct GeluTanh {
  static constexpr float kTwoRootTwoOverPi = 1.5957691216f;
  static constexpr float kCubic = 0.044715f;
  static __device__ __forceinline__ float value(float x) {
    return x * sigmoid(kTwoRootTwoOverPi * x * (1.0f + kCubic * x * x));
  }
  static __device__ __forceinline__ float slope(float x) {
    const float s = sigmoid(kTwoRootTwoOverPi * x * (1.0f + kCubic * x * x));
    return fmaf(x * s, (1.0f - s) * kTwoRootTwoOverPi * fmaf(3.0f * kCubic, x * x, 1.0f), s);
  }
};

/// NaN stays NaN; the slope at 0 is 0.
struct Relu {
  static __device__ __forceinline__ float value(float x) { return x < 0.0f ? 0.0f : x; }
  static __device__ __forceinline__ float slope(float x) { return x > 0.0f ? 1.0f : 0.0f; }
};

struct Relu2 {
  static __device__ __forceinline__ float value(float x) { return x < 0.0f ? 0.0f : x * x; }
  static __device__ __forceinline__ float slope(float x) { return x > 0.0f ? 2.0f * x : 0.0f; }
};

/// f(gate) * up.
template <class Function>
struct Gated {
  static __device__ __forceinline__ float value(float gate, float up, const ActivationScalars&) {
    return Function::value(gate) * up;
  }
  static __device__ __forceinline__ float2 gradient(float gate, float up,
                                                    const ActivationScalars&) {
    return {Function::slope(gate) * up, Function::value(gate)};
  }
};

struct GatedOai {
  static __device__ __forceinline__ float value(float gate, float up, const ActivationScalars& c) {
    const float g = ptx::smaller(gate, c.limit);
    const float u = ptx::smaller(ptx::larger(up, -c.limit), c.limit);
    return g * sigmoid(c.alpha * g) * (u + 1.0f);
  }
  /// A clamp passes its gradient at equality.
  static __device__ __forceinline__ float2 gradient(float gate, float up,
                                                    const ActivationScalars& c) {
    const float g = ptx::smaller(gate, c.limit);
    const float u = ptx::smaller(ptx::larger(up, -c.limit), c.limit);
    const float s = sigmoid(c.alpha * g);
    const float by_gate = fmaf(c.alpha * (g * s), 1.0f - s, s) * (u + 1.0f);
    const bool outside = up > c.limit || up < -c.limit;
    return {gate > c.limit ? 0.0f : by_gate, outside ? 0.0f : g * s};
  }
};

template <class Function>
struct Plain {
  static __device__ __forceinline__ float value(float x) { return Function::value(x); }
  static __device__ __forceinline__ float gradient(float x) { return Function::slope(x); }
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

}  // namespace sonicmoe::cuda
