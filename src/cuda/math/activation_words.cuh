// The activations and their gradients on packed words of H (fragment.cuh has the layout).
#pragma once

#include "cuda/math/activation.cuh"
#include "cuda/math/element.cuh"

namespace sonicmoe::cuda {

/// Computes a word of A = r(act(H)), which has two columns, from words of the rounded H.
template <class Element, ActivationKind kKind>
struct ActivationWords {
  using Act = ActivationOf<kKind>;
  using Two = Pair<Element>;

  /// For GateLayout::kConcatenated: `gate` has the gates and `up` the ups of the two columns.
  static __device__ __forceinline__ std::uint32_t split(std::uint32_t gate, std::uint32_t up,
                                                        const ActivationScalars& scalars) {
    return Two::pack(Act::value(Two::low(gate), Two::low(up), scalars),
                     Act::value(Two::high(gate), Two::high(up), scalars));
  }
  /// For GateLayout::kInterleaved: each word has the gate (low) and the up (high) of one column.
  static __device__ __forceinline__ std::uint32_t paired(std::uint32_t first, std::uint32_t second,
                                                         const ActivationScalars& scalars) {
    return Two::pack(Act::value(Two::low(first), Two::high(first), scalars),
                     Act::value(Two::low(second), Two::high(second), scalars));
  }
  /// For activations without a gate: `h` has H of the two columns.
  static __device__ __forceinline__ std::uint32_t plain(std::uint32_t h) {
    return Two::pack(Act::value(Two::low(h)), Act::value(Two::high(h)));
  }
};

/// Backward of the activation for two neighbouring columns of one row. The words of H, and of dH
/// after the call:
///
///   | layout           | first                   | second                  |
///   | concatenated     | gates of both columns   | ups of both columns     |
///   | interleaved      | gate and up of column 0 | gate and up of column 1 |
///   | without a gate   | H of both columns       | unused                  |
template <class Element, ActivationKind kKind, GateLayout kLayout>
struct ActivationGradientWords {
  using Act = ActivationOf<kKind>;
  using Two = Pair<Element>;

  /// `grad` has dA' of the two columns in fp32, not scaled; `s` is the row's score. Overwrites H
  /// with dH = r(act'(H) s dA'), adds the two columns' part of dS = sum of dA' r(act(H)) to
  /// `score`, and returns A' = r(s act(H)).
  static __device__ __forceinline__ std::uint32_t run(const ActivationScalars& scalars,
                                                      std::uint32_t& first, std::uint32_t& second,
                                                      const float* grad, float s, float& score) {
    Gradient of[2];
    if constexpr (!is_gated(kKind)) {
      of[0] = Act::gradient(Two::low(first), s * grad[0]);
      of[1] = Act::gradient(Two::high(first), s * grad[1]);
      first = Two::pack(of[0].by_gate, of[1].by_gate);
    } else if constexpr (kLayout == GateLayout::kInterleaved) {
      of[0] = Act::gradient(Two::low(first), Two::high(first), s * grad[0], scalars);
      of[1] = Act::gradient(Two::low(second), Two::high(second), s * grad[1], scalars);
      first = Two::pack(of[0].by_gate, of[0].by_up);
      second = Two::pack(of[1].by_gate, of[1].by_up);
    } else {
      of[0] = Act::gradient(Two::low(first), Two::low(second), s * grad[0], scalars);
      of[1] = Act::gradient(Two::high(first), Two::high(second), s * grad[1], scalars);
      first = Two::pack(of[0].by_gate, of[1].by_gate);
      second = Two::pack(of[0].by_up, of[1].by_up);
    }
    return finish(of, grad, s, score);
  }

  /// As run() with kConcatenated or without a gate, but reads H as fp32 values: h[0] has the gates
  /// (or H, if there is no gate), h[1] the ups. Writes dH to `first` and `second`.
  static __device__ __forceinline__ std::uint32_t run_values(
      const ActivationScalars& scalars, const float2 (&h)[2], std::uint32_t& first,
      std::uint32_t& second, const float* grad, float s, float& score) {
    Gradient of[2];
    if constexpr (is_gated(kKind)) {
      of[0] = Act::gradient(h[0].x, h[1].x, s * grad[0], scalars);
      of[1] = Act::gradient(h[0].y, h[1].y, s * grad[1], scalars);
      second = Two::pack(of[0].by_up, of[1].by_up);
    } else {
      of[0] = Act::gradient(h[0].x, s * grad[0]);
      of[1] = Act::gradient(h[0].y, s * grad[1]);
    }
    first = Two::pack(of[0].by_gate, of[1].by_gate);
    return finish(of, grad, s, score);
  }

 private:
  static __device__ __forceinline__ std::uint32_t finish(const Gradient (&of)[2], const float* grad,
                                                         float s, float& score) {
    const float2 rounded = Two::round(of[0].value, of[1].value);
    score = fmaf(grad[0], rounded.x, score);
    score = fmaf(grad[1], rounded.y, score);
    return Two::pack(s * of[0].value, s * of[1].value);
  }
};

}  // namespace sonicmoe::cuda
