// Activations and their derivatives on vectors, and the two epilogues that use them
// (docs/method.md): kernel A computes H and A from the accumulators; kernel dH computes dH, A' and
// dS from dA' and H.
#pragma once

#include "cpu/activation_math.h"
#include "cpu/gemm_kernels.h"

namespace sonicmoe::cpu::SONICMOE_ISA {

/// f(x) and f'(x).
template <class V>
struct Slope {
  V value;
  V derivative;
};

template <class V>
inline V splat_as(double v) {
  using T = decltype(V{}[0] + V{}[0]);
  return splat(static_cast<T>(v));
}

struct Silu {
  template <class V>
  static Slope<V> at(V x) {
    const V s = sigmoid(x);
    return {x * s, s * (1 + x * (1 - s))};
  }
};
struct Gelu {
  template <class V>
  static Slope<V> at(V x) {
    const V distribution = splat_as<V>(0.5) * (1 + erf(x * splat_as<V>(0.70710678118654752440)));
    const V density = splat_as<V>(0.39894228040143267794) * exp(splat_as<V>(-0.5) * x * x);
    return {x * distribution, distribution + x * density};
  }
};
/// x (1 + tanh(u)) / 2 = x sigmoid(2u). Both sigmoid(2u) and 1 - sigmoid(2u) are computed from
/// e^-|2u|, so that the smaller of the two keeps its relative accuracy; a subtraction would cancel.
struct GeluTanh {
  template <class V>
  static Slope<V> at(V x) {
    const V c = splat_as<V>(2 * 0.79788456080286535588);
    const V cubic = splat_as<V>(0.044715);
    const V z = c * (x + cubic * x * x * x);
    const V tail = exp(z > V{} ? -z : z);
    const V large = 1 / (1 + tail);
    const V small = tail * large;
    const V s = z > V{} ? large : small;
    return {x * s, s + x * (large * small) * (c * (1 + 3 * cubic * x * x))};
  }
};
/// max(x, 0). NaN stays NaN; the derivative at 0 is 0.
struct Relu {
  template <class V>
  static Slope<V> at(V x) {
    const V zero{};
    return {x <= zero ? zero : x, x > zero ? splat_as<V>(1) : zero};
  }
};
struct Relu2 {
  template <class V>
  static Slope<V> at(V x) {
    const V positive = Relu::at(x).value;
    return {positive * positive, 2 * positive};
  }
};

/// act(gate, up) and its partial derivatives. Activations without a gate read `up` only.
template <class V>
struct Activated {
  V value;
  V by_gate;
  V by_up;
};

template <class F>
struct Gated {
  static constexpr std::int64_t kGates = 2;
  explicit Gated(const Activation&) {}
  template <class V>
  Activated<V> operator()(V gate, V up) const {
    const Slope<V> f = F::at(gate);
    return {f.value * up, f.derivative * up, f.value};
  }
};
template <class F>
struct Plain {
  static constexpr std::int64_t kGates = 1;
  explicit Plain(const Activation&) {}
  template <class V>
  Activated<V> operator()(V, V up) const {
    const Slope<V> f = F::at(up);
    return {f.value, V{}, f.derivative};
  }
};
struct SwigluOai {
  static constexpr std::int64_t kGates = 2;
  explicit SwigluOai(const Activation& a)
      : alpha(with_defaults(a).alpha), limit(with_defaults(a).limit) {}
  template <class V>
  Activated<V> operator()(V gate, V up) const {
    const V zero{};
    const V top = splat_as<V>(limit);
    const V bottom = -top;
    const V alphas = splat_as<V>(alpha);
    const V g = gate > top ? top : gate;
    const V u = up > top ? top : (up < bottom ? bottom : up);
    const V s = sigmoid(alphas * g);
    const V by_gate = (u + 1) * s * (1 + alphas * g * (1 - s));
    const V by_up = g * s;
    return {g * s * (u + 1), gate > top ? zero : by_gate,
            up > top ? zero : (up < bottom ? zero : by_up)};
  }
  double alpha;
  double limit;
};

struct SwigluClamped {
  static constexpr std::int64_t kGates = 2;
  explicit SwigluClamped(const Activation& a) : limit(with_defaults(a).limit) {}
  template <class V>
  Activated<V> operator()(V gate, V up) const {
    const V zero{};
    const V top = splat_as<V>(limit);
    const V bottom = -top;
    const Slope<V> f = Silu::at(gate > top ? top : gate);
    const V u = up > top ? top : (up < bottom ? bottom : up);
    return {f.value * u, gate > top ? zero : f.derivative * u,
            up > top ? zero : (up < bottom ? zero : f.value)};
  }
  double limit;
};

/// The limit of the gate is applied after silu.
struct SwigluStep {
  static constexpr std::int64_t kGates = 2;
  explicit SwigluStep(const Activation& a) : limit(with_defaults(a).limit) {}
  template <class V>
  Activated<V> operator()(V gate, V up) const {
    const V zero{};
    const V top = splat_as<V>(limit);
    const V bottom = -top;
    const Slope<V> f = Silu::at(gate);
    const V value = f.value > top ? top : f.value;
    const V u = up > top ? top : (up < bottom ? bottom : up);
    return {value * u, f.value > top ? zero : f.derivative * u,
            up > top ? zero : (up < bottom ? zero : value)};
  }
  double limit;
};

struct Situ {
  static constexpr std::int64_t kGates = 2;
  explicit Situ(const Activation& a)
      : cap_gate(with_defaults(a).alpha), cap_up(with_defaults(a).limit) {}
  template <class V>
  Activated<V> operator()(V gate, V up) const {
    const V s = sigmoid(gate);
    const Slope<V> g = capped(gate, cap_gate);
    const Slope<V> u = capped(up, cap_up);
    const V f = g.value * s;
    return {f * u.value, s * (g.derivative + g.value * (1 - s)) * u.value, f * u.derivative};
  }
  double cap_gate;
  double cap_up;

 private:
  /// cap tanh(x / cap). The derivative 1 - tanh^2 is computed as 4 e / (1 + e)^2, e = e^-2|x /
  /// cap|, which keeps its relative accuracy where tanh is near 1.
  template <class V>
  static Slope<V> capped(V x, double cap) {
    const V z = x / splat_as<V>(cap);
    const V tail = exp(z > V{} ? -2 * z : 2 * z);
    const V inverse = 1 / (1 + tail);
    return {splat_as<V>(cap) * tanh(z), 4 * tail * inverse * inverse};
  }
};

/// Calls body(functor) with the functor of the activation's kind.
template <class Body>
inline void with_activation(const Activation& a, Body&& body) {
  switch (a.kind) {
    case ActivationKind::kSwiGLU:
      return body(Gated<Silu>(a));
    case ActivationKind::kSwiGLUOai:
      return body(SwigluOai(a));
    case ActivationKind::kGeGLU:
      return body(Gated<Gelu>(a));
    case ActivationKind::kGeGLUTanh:
      return body(Gated<GeluTanh>(a));
    case ActivationKind::kReGLU:
      return body(Gated<Relu>(a));
    case ActivationKind::kSiLU:
      return body(Plain<Silu>(a));
    case ActivationKind::kGELU:
      return body(Plain<Gelu>(a));
    case ActivationKind::kGELUTanh:
      return body(Plain<GeluTanh>(a));
    case ActivationKind::kReLU:
      return body(Plain<Relu>(a));
    case ActivationKind::kReLU2:
      return body(Plain<Relu2>(a));
    case ActivationKind::kSwiGLUClamped:
      return body(SwigluClamped(a));
    case ActivationKind::kSiTU:
      return body(Situ(a));
    case ActivationKind::kSwiGLUStep:
      return body(SwigluStep(a));
  }
}

/// r(acc + bias). Also stored to `h` unless that is null.
template <class S>
inline typename Lane<S>::V hidden(const Tile& acc, const void* bias, void* h,
                                  std::int64_t offset_acc, std::int64_t c, std::int64_t offset_h) {
  using Acc = typename Lane<S>::Acc;
  const std::int64_t n = acc.cols - c;
  auto v = load_n(static_cast<const Acc*>(acc.values) + offset_acc, n);
  if (bias != nullptr) v += load_n(static_cast<const Acc*>(bias) + c, n);
  if (h != nullptr) store_n(static_cast<S*>(h) + offset_h, v, n);
  return round_to<S>(v);
}

template <class S>
void forward_tile(const ForwardTile& t) {
  using V = typename Lane<S>::V;
  with_activation(t.activation, [&](auto act) {
    for (std::int64_t r = 0; r < t.up.rows; ++r) {
      for (std::int64_t c = 0; c < t.up.cols; c += Lane<S>::kCount) {
        const std::int64_t at = r * t.up.stride + c;
        const std::int64_t at_h = r * t.h_stride + c;
        V gate{};
        if constexpr (act.kGates == 2) {
          gate = hidden<S>(t.gate, t.gate_bias, t.h_gate, at, c, at_h);
        }
        const V up = hidden<S>(t.up, t.up_bias, t.h_up, at, c, at_h);
        store_n(static_cast<S*>(t.a) + r * t.a_stride + c, act(gate, up).value, t.up.cols - c);
      }
    }
  });
}

template <class S>
void backward_tile(const BackwardTile& t) {
  using V = typename Lane<S>::V;
  using Acc = typename Lane<S>::Acc;
  with_activation(t.activation, [&](auto act) {
    for (std::int64_t r = 0; r < t.da.rows; ++r) {
      const V score = splat(static_cast<Acc>(t.scores[r]));
      V partial{};  // of dS, by lane
      for (std::int64_t c = 0; c < t.da.cols; c += Lane<S>::kCount) {
        const std::int64_t n = t.da.cols - c;
        const std::int64_t at = r * t.h_stride + c;
        const std::int64_t at_dh = r * t.dh_stride + c;
        const V da_unscaled = load_n(static_cast<const Acc*>(t.da.values) + r * t.da.stride + c, n);
        const V da = score * da_unscaled;
        V gate{};
        if constexpr (act.kGates == 2) gate = load_n(static_cast<const S*>(t.h_gate) + at, n);
        const auto a = act(gate, load_n(static_cast<const S*>(t.h_up) + at, n));
        if (t.dh_up != nullptr) {
          if constexpr (act.kGates == 2) {
            store_n(static_cast<S*>(t.dh_gate) + at_dh, a.by_gate * da, n);
          }
          store_n(static_cast<S*>(t.dh_up) + at_dh, a.by_up * da, n);
        }
        if (t.scaled != nullptr) {
          store_n(static_cast<S*>(t.scaled) + r * t.scaled_stride + c, score * a.value, n);
        }
        partial = fma(da_unscaled, round_to<S>(a.value), partial);
      }
      if (t.dscores != nullptr) t.dscores[r] += static_cast<double>(sum_lanes(partial));
    }
  });
}

}  // namespace sonicmoe::cpu::SONICMOE_ISA
