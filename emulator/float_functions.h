// The floating-point operations on the values of one lane, and the modifiers of the operations.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "small_floats.h"

namespace sonicmoe::emulator::floating {

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
using emulator::widen;

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 8, std::uint64_t,
                                  std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint16_t>>;

template <class T>
inline constexpr BitsOf<T> kSign = BitsOf<T>{1} << (8 * sizeof(T) - 1);

template <class T>
inline constexpr BitsOf<T> kExponent = 0;
template <>
inline constexpr std::uint32_t kExponent<float> = kInfinity32;
template <>
inline constexpr std::uint64_t kExponent<double> = 0x7ff0'0000'0000'0000;
template <>
inline constexpr std::uint16_t kExponent<Half> = kInfinityHalf;
template <>
inline constexpr std::uint16_t kExponent<Brain> = 0x7f80;

template <class T>
BitsOf<T> bits_of(T x) {
  return std::bit_cast<BitsOf<T>>(x);
}
template <class T>
T from_bits(BitsOf<T> bits) {
  return std::bit_cast<T>(bits);
}

template <class T>
BitsOf<T> magnitude_of(T x) {
  return static_cast<BitsOf<T>>(bits_of(x) & ~kSign<T>);
}
template <class T>
bool is_nan(T x) {
  return magnitude_of(x) > kExponent<T>;
}

/// The NaN that PTX makes of this type.
template <class T>
T nan_of() {
  return from_bits<T>(static_cast<BitsOf<T>>(~kSign<T>));
}

/// Instructions of float make one NaN only. Those of double keep the bits that the host makes.
inline float canonical(float x) { return x == x ? x : nan_of<float>(); }
inline double canonical(double x) { return x; }

template <class T>
T flush_subnormal(T x) {
  const BitsOf<T> bits = bits_of(x);
  return from_bits<T>((bits & kExponent<T>) == 0 ? static_cast<BitsOf<T>>(bits & kSign<T>) : bits);
}

// Modifiers.

/// .ftz
template <class Op>
struct Flush {
  template <class... T>
  auto operator()(T... x) const {
    return flush_subnormal(Op()(flush_subnormal(x)...));
  }
};

/// .sat: to [0, 1]; NaN becomes 0.
template <class Op>
struct Saturate {
  template <class T, class... More>
  T operator()(T x, More... more) const {
    const T result = Op()(x, more...);
    const auto value = widen(result);
    if (!(value > 0)) return from_bits<T>(0);
    return value > 1 ? one(result) : result;
  }
  static float one(float) { return 1; }
  static Half one(Half) { return to_half(1); }
};

/// .relu: NaN stays.
template <class Op>
struct Rectify {
  template <class T, class... More>
  T operator()(T x, More... more) const {
    const T result = Op()(x, more...);
    return widen(result) < 0 || bits_of(result) == kSign<T> ? from_bits<T>(0) : result;
  }
};

/// Op on numbers of 16 bits: computed in double, then rounded. For sums and products the result
/// equals the exact result rounded once.
template <class Op>
struct Small {
  template <class T, class... More>
  T operator()(T x, More... more) const {
    return narrow<T>(Op()(static_cast<double>(widen(x)), static_cast<double>(widen(more))...));
  }
};

// Operations.

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return canonical(a + b);
  }
};

struct Subtract {
  template <class T>
  T operator()(T a, T b) const {
    return canonical(a - b);
  }
};

struct Multiply {
  template <class T>
  T operator()(T a, T b) const {
    return canonical(a * b);
  }
};

struct Divide {
  template <class T>
  T operator()(T a, T b) const {
    return canonical(a / b);
  }
};

struct FusedMultiplyAdd {
  template <class T>
  T operator()(T a, T b, T c) const {
    return canonical(std::fma(a, b, c));
  }
};

/// a * b + c for factors of 16 bits, whose product is exact in double. If the sum is not exact, its
/// last bit is set, so that a further rounding to 16 bits sees on which side of the sum the exact
/// value lies.
struct SmallMultiplyAdd {
  double operator()(double a, double b, double c) const {
    const double product = a * b;
    const double sum = product + c;
    const double added = sum - product;
    const double error = (product - (sum - added)) + (c - added);
    const std::uint64_t bits = bits_of(sum);
    const std::uint64_t is_inexact = std::fabs(error) > 0;  // false for NaN
    const std::uint64_t is_below = (error > 0) == (sum > 0);
    const std::uint64_t moves = is_inexact & ~bits & 1;
    return from_bits<double>(bits + 2 * (moves & is_below) - moves);
  }
};

/// min and max of two numbers. If one operand is NaN, the result is the other. -0 is below +0.
template <class IsFirst, class OfEqual>
struct Extreme {
  template <class T>
  T operator()(T a, T b) const {
    const auto x = widen(a);
    const auto y = widen(b);
    // Equal numbers have the same bits, zeros apart.
    const auto equal = from_bits<T>(static_cast<BitsOf<T>>(OfEqual()(bits_of(a), bits_of(b))));
    const T chosen = IsFirst()(x, y) || y != y ? a : b;
    const T number = x == y ? equal : chosen;
    return is_nan(number) ? nan_of<T>() : number;
  }
};

/// .NaN: NaN if an operand is NaN.
template <class Op>
struct SpreadNan {
  template <class T>
  T operator()(T a, T b) const {
    return is_nan(a) || is_nan(b) ? nan_of<T>() : Op()(a, b);
  }
};

/// .xorsign.abs: Op on the absolute values, with the sign of the product of a and b.
template <class Op>
struct XorSign {
  template <class T>
  T operator()(T a, T b) const {
    const T magnitude = Op()(from_bits<T>(magnitude_of(a)), from_bits<T>(magnitude_of(b)));
    return from_bits<T>(
        static_cast<BitsOf<T>>(bits_of(magnitude) | ((bits_of(a) ^ bits_of(b)) & kSign<T>)));
  }
};

struct Absolute {
  template <class T>
  T operator()(T x) const {
    return from_bits<T>(magnitude_of(x));
  }
};

struct Negate {
  template <class T>
  T operator()(T x) const {
    return from_bits<T>(static_cast<BitsOf<T>>(bits_of(x) ^ kSign<T>));
  }
};

/// The sign of a on b.
struct CopySign {
  template <class T>
  T operator()(T a, T b) const {
    return from_bits<T>(magnitude_of(b) | (bits_of(a) & kSign<T>));
  }
};

struct Reciprocal {
  template <class T>
  T operator()(T x) const {
    return canonical(1 / x);
  }
};

struct SquareRoot {
  template <class T>
  T operator()(T x) const {
    return canonical(std::sqrt(x));
  }
};

struct ReciprocalRoot {
  template <class T>
  T operator()(T x) const {
    return canonical(1 / std::sqrt(x));
  }
};

/// rcp and rsqrt.approx.ftz.f64 read and write only the upper 32 bits.
template <class Op>
struct UpperHalf {
  double operator()(double x) const { return cut(Op()(cut(x))); }
  static double cut(double x) {
    const std::uint64_t bits = bits_of(flush_subnormal(x)) & 0xffff'ffff'0000'0000;
    return is_nan(x) ? nan_of<double>() : from_bits<double>(bits);
  }
};

struct Exponential2 {
  float operator()(float x) const { return canonical(std::exp2(x)); }
  double operator()(double x) const { return std::exp2(x); }
};

struct Logarithm2 {
  float operator()(float x) const { return canonical(std::log2(x)); }
};

struct Sine {
  float operator()(float x) const { return canonical(std::sin(x)); }
};

struct Cosine {
  float operator()(float x) const { return canonical(std::cos(x)); }
};

struct HyperbolicTangent {
  float operator()(float x) const { return canonical(std::tanh(x)); }
  double operator()(double x) const { return std::tanh(x); }
};

}  // namespace sonicmoe::emulator::floating
