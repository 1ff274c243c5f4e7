// Applies the activation to words of H. The activation is a kernel argument: kernels branch on it
// for every eight columns. As a template argument it would make 12 times as many kernels necessary.
// Only the epilogue of A has a loop without this branch, for SwiGLU: A is 1 to 3 % faster (H100,
// hot). Such a loop for each activation would compile ten times as long.
#pragma once

#include <cstdint>

#include "cuda/math/activation_words.cuh"
#include "cuda/portable/params.h"

namespace sonicmoe::cuda::portable {

/// Calls `call` with the activation as its template argument.
template <class Call>
__device__ __forceinline__ void with_activation(ActivationKind kind, const Call& call) {
  switch (kind) {
    case ActivationKind::kSwiGLU:
      return call.template operator()<ActivationKind::kSwiGLU>();
    case ActivationKind::kSwiGLUOai:
      return call.template operator()<ActivationKind::kSwiGLUOai>();
    case ActivationKind::kGeGLU:
      return call.template operator()<ActivationKind::kGeGLU>();
    case ActivationKind::kGeGLUTanh:
      return call.template operator()<ActivationKind::kGeGLUTanh>();
    case ActivationKind::kReGLU:
      return call.template operator()<ActivationKind::kReGLU>();
    case ActivationKind::kSiLU:
      return call.template operator()<ActivationKind::kSiLU>();
    case ActivationKind::kGELU:
      return call.template operator()<ActivationKind::kGELU>();
    case ActivationKind::kGELUTanh:
      return call.template operator()<ActivationKind::kGELUTanh>();
    case ActivationKind::kReLU:
      return call.template operator()<ActivationKind::kReLU>();
    case ActivationKind::kReLU2:
      return call.template operator()<ActivationKind::kReLU2>();
    case ActivationKind::kSwiGLUClamped:
      return call.template operator()<ActivationKind::kSwiGLUClamped>();
    case ActivationKind::kSiTU:
      return call.template operator()<ActivationKind::kSiTU>();
    case ActivationKind::kSwiGLUStep:
      return;  // kernel_kind() gives kSwiGLUClamped instead
  }
}

/// Converts two words in which gate and up alternate to a word of gates and a word of ups. A second
/// call converts them back.
__device__ __forceinline__ void exchange_halves(std::uint32_t& first, std::uint32_t& second) {
  const std::uint32_t low = __byte_perm(first, second, 0x5410);
  second = __byte_perm(first, second, 0x7632);
  first = low;
}

/// H for eight columns of A in one row. Without a gate, `gate` holds H and `up` is not used.
struct HiddenWords {
  std::uint32_t gate[4];
  std::uint32_t up[4];

  __device__ __forceinline__ void exchange() {
#pragma unroll
    for (int i = 0; i < 4; i++) exchange_halves(gate[i], up[i]);
  }
  /// Words 4 * which .. 4 * which + 3 in the order of memory, if gate and up alternate there:
  /// gate[0], up[0], gate[1], ...
  __device__ __forceinline__ uint4 quad(int which) const {
    return {gate[2 * which], up[2 * which], gate[2 * which + 1], up[2 * which + 1]};
  }
  __device__ __forceinline__ void set_quad(int which, const uint4& v) {
    gate[2 * which] = v.x;
    up[2 * which] = v.y;
    gate[2 * which + 1] = v.z;
    up[2 * which + 1] = v.w;
  }
  __device__ __forceinline__ void set_gates(const uint4& v) {
    gate[0] = v.x, gate[1] = v.y, gate[2] = v.z, gate[3] = v.w;
  }
  __device__ __forceinline__ void set_ups(const uint4& v) {
    up[0] = v.x, up[1] = v.y, up[2] = v.z, up[3] = v.w;
  }
};

/// A = r(act(H)) for kPieces pieces of eight columns. The instructions of all pieces alternate:
/// instructions of one piece depend on each other, and a piece alone would wait for most of them.
template <class Element, ActivationKind kKind, int kPieces>
__device__ __forceinline__ void activate(const ActivationScalars& scalars,
                                         const HiddenWords (&h)[kPieces],
                                         std::uint32_t (&a)[kPieces][4]) {
  using Act = ActivationWords<Element, kKind>;
#pragma unroll
  for (int i = 0; i < 4; i++) {
#pragma unroll
    for (int piece = 0; piece < kPieces; piece++) {
      if constexpr (is_gated(kKind)) {
        a[piece][i] = Act::split(h[piece].gate[i], h[piece].up[i], scalars);
      } else {
        a[piece][i] = Act::plain(h[piece].gate[i]);
      }
    }
  }
}

/// The activation that a loop of an epilogue applies. OneKind: the activation kOne. AnyKind: the
/// activation of the call; kGated says whether it has a gate, so that the loop contains only the
/// activations with, or only those without a gate.
template <ActivationKind kOne>
struct OneKind {
  template <class Element, bool, int kPieces>
  static __device__ __forceinline__ void activate(const Activating& act,
                                                  const HiddenWords (&h)[kPieces],
                                                  std::uint32_t (&a)[kPieces][4]) {
    portable::activate<Element, kOne>(act.scalars, h, a);
  }
};
struct AnyKind {
  template <class Element, bool kGated, int kPieces>
  static __device__ __forceinline__ void activate(const Activating& act,
                                                  const HiddenWords (&h)[kPieces],
                                                  std::uint32_t (&a)[kPieces][4]) {
    with_activation(act.kind, [&]<ActivationKind kKind>() {
      if constexpr (is_gated(kKind) == kGated) {
        portable::activate<Element, kKind>(act.scalars, h, a);
      }
    });
  }
};

/// Inputs and outputs of backward for eight columns, besides H.
struct GradPiece {
  float grad[8];
  float weight;
  float score = 0.0f;
  std::uint32_t a[4];
};

template <class T, int kCount>
__device__ __forceinline__ void rotate(T (&values)[kCount], int by) {
#pragma unroll
  for (int turn = 0; turn < by; turn++) {
    const T first = values[0];
#pragma unroll
    for (int i = 0; i + 1 < kCount; i++) values[i] = values[i + 1];
    values[kCount - 1] = first;
  }
}

/// For eight columns: replaces H by dH, sets A' and adds to the score (ActivationGradientWords).
///
/// situ needs so many registers that eight columns at once would spill. So its loop is not
/// unrolled: each iteration takes the first word, and rotates the arrays, whose indices must be
/// constants.
template <class Element>
__device__ __forceinline__ void differentiate(const Activating& act, HiddenWords& h,
                                              GradPiece& piece) {
  with_activation(act.kind, [&]<ActivationKind kKind>() {
    using Act = ActivationGradientWords<Element, kKind, GateLayout::kConcatenated>;
    if constexpr (kKind == ActivationKind::kSiTU) {
#pragma unroll 1
      for (int i = 0; i < 4; i++) {
        piece.a[0] =
            Act::run(act.scalars, h.gate[0], h.up[0], &piece.grad[0], piece.weight, piece.score);
        rotate(h.gate, 1);
        rotate(h.up, 1);
        rotate(piece.a, 1);
        rotate(piece.grad, 2);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        piece.a[i] = Act::run(act.scalars, h.gate[i], h.up[i], &piece.grad[2 * i], piece.weight,
                              piece.score);
      }
    }
  });
}

__device__ __forceinline__ uint4 quad_of(const std::uint32_t (&words)[4]) {
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace sonicmoe::cuda::portable
