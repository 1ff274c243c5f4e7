// The integer operations on the values of one lane.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "program.h"

namespace sonicmoe::emulator::integer {

template <class T>
constexpr int kBits = 8 * static_cast<int>(sizeof(T));

template <class T>
using Unsigned = std::make_unsigned_t<T>;

/// The type in which products and sums of T wrap without undefined behaviour: unsigned, and not
/// promoted to int.
template <class T>
using Wrapping = std::common_type_t<Unsigned<T>, std::uint32_t>;

// The type of a product of two T.
template <class T>
struct ProductOf;
template <>
struct ProductOf<std::uint16_t> : std::type_identity<std::uint32_t> {};
template <>
struct ProductOf<std::int16_t> : std::type_identity<std::int32_t> {};
template <>
struct ProductOf<std::uint32_t> : std::type_identity<std::uint64_t> {};
template <>
struct ProductOf<std::int32_t> : std::type_identity<std::int64_t> {};
template <>
struct ProductOf<std::uint64_t> : std::type_identity<unsigned __int128> {};
template <>
struct ProductOf<std::int64_t> : std::type_identity<__int128> {};
template <class T>
using Product = typename ProductOf<T>::type;

struct Add {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  }
};

struct Subtract {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b));
  }
};

inline std::int32_t saturate(std::int64_t value) {
  using Limits = std::numeric_limits<std::int32_t>;
  return static_cast<std::int32_t>(std::clamp<std::int64_t>(value, Limits::min(), Limits::max()));
}

struct SaturatingAdd {
  std::int32_t operator()(std::int64_t a, std::int64_t b) const { return saturate(a + b); }
};

struct SaturatingSubtract {
  std::int32_t operator()(std::int64_t a, std::int64_t b) const { return saturate(a - b); }
};

struct MultiplyLow {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
  }
};

struct MultiplyHigh {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(static_cast<Product<T>>(a) * static_cast<Product<T>>(b) >> kBits<T>);
  }
};

struct MultiplyWide {
  template <class T>
  Product<T> operator()(T a, T b) const {
    return static_cast<Product<T>>(a) * static_cast<Product<T>>(b);
  }
};

/// The low 32 bits of the product of the low 24 bits.
struct Multiply24Low {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(product(a, b));
  }
  template <class T>
  static Product<T> product(T a, T b) {
    return MultiplyWide()(cut(a), cut(b));
  }
  static std::uint32_t cut(std::uint32_t x) { return x & 0xffffff; }
  static std::int32_t cut(std::int32_t x) { return static_cast<std::int32_t>(x << 8) >> 8; }
};

/// Bits 16 to 47 of the product of the low 24 bits.
struct Multiply24High {
  template <class T>
  T operator()(T a, T b) const {
    return static_cast<T>(Multiply24Low::product(a, b) >> 16);
  }
};

template <class Multiply>
struct MultiplyAdd {
  template <class T, class C>
  C operator()(T a, T b, C c) const {
    return Add()(static_cast<C>(Multiply()(a, b)), c);
  }
};

/// Throws Fault for a division by zero: it is undefined in CUDA C++, so the kernel has a bug.
template <class T>
void check_divisor(T b) {
  if (b == 0) throw Fault("an integer is divided by zero");
}

struct Divide {
  template <class T>
  T operator()(T a, T b) const {
    check_divisor(b);
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Subtract()(T{0}, a);
    return static_cast<T>(a / b);
  }
};

struct Remainder {
  template <class T>
  T operator()(T a, T b) const {
    check_divisor(b);
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};

struct Negate {
  template <class T>
  T operator()(T a) const {
    return Subtract()(T{0}, a);
  }
};

struct Absolute {
  template <class T>
  T operator()(T a) const {
    return a < 0 ? Negate()(a) : a;
  }
};

struct Minimum {
  template <class T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

struct Maximum {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

template <class Op>
struct NotNegative {
  template <class T>
  T operator()(T a, T b) const {
    return Maximum()(Op()(a, b), T{0});
  }
};

struct SumOfDifferences {
  template <class T>
  T operator()(T a, T b, T c) const {
    return Add()(c, a < b ? Subtract()(b, a) : Subtract()(a, b));
  }
};

struct And {
  template <class T>
  T operator()(T a, T b) const {
    return a & b;
  }
};

struct Or {
  template <class T>
  T operator()(T a, T b) const {
    return a | b;
  }
};

struct Xor {
  template <class T>
  T operator()(T a, T b) const {
    return a ^ b;
  }
};

struct Not {
  template <class T>
  T operator()(T a) const {
    return static_cast<T>(~a);
  }
};

struct IsZero {
  template <class T>
  T operator()(T a) const {
    return a == 0;
  }
};

struct ShiftLeft {
  template <class T>
  T operator()(T a, std::uint32_t by) const {
    return by >= kBits<T> ? T{0} : static_cast<T>(static_cast<Wrapping<T>>(a) << by);
  }
};

struct ShiftRight {
  template <class T>
  T operator()(T a, std::uint32_t by) const {
    if (std::is_signed_v<T>) return static_cast<T>(a >> std::min<std::uint32_t>(by, kBits<T> - 1));
    return by >= kBits<T> ? T{0} : static_cast<T>(a >> by);
  }
};

/// bfe. Bits above the field, or above the register, are zeros or copies of the field's last bit.
struct ExtractField {
  template <class T>
  T operator()(T a, std::uint32_t b, std::uint32_t c) const {
    const std::uint32_t position = b & 0xff;
    const std::uint32_t length = c & 0xff;
    if (length == 0) return 0;
    const T shifted = ShiftRight()(a, position);
    if (length >= kBits<T>) return shifted;
    const std::uint32_t unused = kBits<T> - length;
    return ShiftRight()(static_cast<T>(static_cast<Unsigned<T>>(shifted) << unused), unused);
  }
};

/// bfi: the low bits of a over those of b.
struct InsertField {
  template <class T>
  T operator()(T a, T b, std::uint32_t c, std::uint32_t d) const {
    const std::uint32_t position = c & 0xff;
    const std::uint32_t length = d & 0xff;
    const T ones = length >= kBits<T> ? static_cast<T>(~T{0}) : (T{1} << length) - 1;
    const T field = ShiftLeft()(ones, position);
    return (b & ~field) | (ShiftLeft()(a, position) & field);
  }
};

/// bfind: the highest bit that differs from the sign.
struct FindBit {
  template <class T>
  std::uint32_t operator()(T a) const {
    const auto bits = static_cast<Unsigned<T>>(a < 0 ? ~a : a);
    return static_cast<std::uint32_t>(kBits<T> - 1 - std::countl_zero(bits));
  }
};

struct FindShift {
  template <class T>
  std::uint32_t operator()(T a) const {
    const std::uint32_t bit = FindBit()(a);
    return bit == ~0u ? bit : kBits<T> - 1 - bit;
  }
};

struct CountOnes {
  template <class T>
  std::uint32_t operator()(T a) const {
    return static_cast<std::uint32_t>(std::popcount(a));
  }
};

struct CountLeadingZeros {
  template <class T>
  std::uint32_t operator()(T a) const {
    return static_cast<std::uint32_t>(std::countl_zero(a));
  }
};

struct Reverse {
  std::uint32_t operator()(std::uint32_t x) const {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
    return __builtin_bswap32(x);
  }
  std::uint64_t operator()(std::uint64_t x) const {
    const Reverse half;
    return static_cast<std::uint64_t>(half(static_cast<std::uint32_t>(x))) << 32 |
           half(static_cast<std::uint32_t>(x >> 32));
  }
};

/// Four bytes of the eight of b:a. Bit 3 of a selector copies the sign of the byte instead.
struct Permute {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t selectors) const {
    const std::uint64_t bytes = static_cast<std::uint64_t>(b) << 32 | a;
    std::uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t selector = selectors >> (4 * i);
      const auto byte = static_cast<std::uint8_t>(bytes >> (8 * (selector & 7)));
      const std::uint32_t sign = (byte & 0x80) != 0 ? 0xff : 0;
      result |= ((selector & 8) != 0 ? sign : byte) << (8 * i);
    }
    return result;
  }
};

/// The modes of prmt with a name. Each has four lists of selectors; c chooses one.
template <std::uint32_t kFirst, std::uint32_t kSecond, std::uint32_t kThird, std::uint32_t kFourth>
struct PermuteByMode {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t c) const {
    constexpr std::uint32_t kSelectors[] = {kFirst, kSecond, kThird, kFourth};
    return Permute()(a, b, kSelectors[c & 3]);
  }
};

struct Clamp {
  static std::uint32_t cut(std::uint32_t by) { return std::min(by, 32u); }
};
struct Wrap {
  static std::uint32_t cut(std::uint32_t by) { return by & 31; }
};

/// shf: 32 bits of b:a.
template <class Limit>
struct FunnelLeft {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t by) const {
    const std::uint64_t both = static_cast<std::uint64_t>(b) << 32 | a;
    return static_cast<std::uint32_t>(both >> (32 - Limit::cut(by)));
  }
};

template <class Limit>
struct FunnelRight {
  std::uint32_t operator()(std::uint32_t a, std::uint32_t b, std::uint32_t by) const {
    const std::uint64_t both = static_cast<std::uint64_t>(b) << 32 | a;
    return static_cast<std::uint32_t>(both >> Limit::cut(by));
  }
};

}  // namespace sonicmoe::emulator::integer
