// Numbers of 16 and 8 bits: float16, bfloat16, e4m3 and e5m2, rounded to nearest even.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace sonicmoe::emulator {

struct Half {
  std::uint16_t bits;
};
struct Brain {
  std::uint16_t bits;
};

/// Where PTX makes a NaN, it makes this one.
inline constexpr std::uint32_t kNan32 = 0x7fffffff;
inline constexpr std::uint16_t kNan16 = 0x7fff;
inline constexpr std::uint8_t kNan8 = 0x7f;

inline constexpr std::uint32_t kInfinity32 = 0x7f800000;
inline constexpr std::uint32_t kMagnitude32 = 0x7fffffff;
inline constexpr std::uint16_t kInfinityHalf = 0x7c00;

inline constexpr float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

/// condition ? a : b without a branch: loops over lanes stay vector code although a and b come from
/// floating-point operations.
inline std::uint32_t select(bool condition, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

/// The bits of |x|, rounded to a format with a shorter fraction and exponent. An overflow yields
/// bits above those of the largest number, as infinity does; NaN is not understood.
template <int kFraction, int kBias>
std::uint32_t round_magnitude(std::uint32_t magnitude) {
  constexpr int kDropped = 23 - kFraction;
  const std::uint32_t odd = (magnitude >> kDropped) & 1;
  const std::uint32_t normal =
      (magnitude - ((127u - kBias) << 23) + ((1u << (kDropped - 1)) - 1) + odd) >> kDropped;
  // The sum's last bit is the last bit of a subnormal number of the format.
  constexpr float kShift = power_of_two(1 - kBias + kDropped);
  const std::uint32_t subnormal =
      std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + kShift) -
      std::bit_cast<std::uint32_t>(kShift);
  return select(magnitude < (128u - kBias) << 23, subnormal, normal);
}

/// The number with these bits, without a sign. NaN and infinity are not understood.
template <int kFraction, int kBias>
float widen_magnitude(std::uint32_t magnitude) {
  return std::bit_cast<float>(magnitude << (23 - kFraction)) * power_of_two(127 - kBias);
}

inline float widen(Half x) {
  const std::uint32_t magnitude = x.bits & 0x7fffu;
  const std::uint32_t sign = (x.bits & 0x8000u) << 16;
  const std::uint32_t finite = std::bit_cast<std::uint32_t>(widen_magnitude<10, 15>(magnitude));
  const std::uint32_t bits = select(magnitude >= kInfinityHalf, kInfinity32, finite) | sign;
  return std::bit_cast<float>(select(magnitude > kInfinityHalf, kNan32, bits));
}

inline float widen(Brain x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

inline Half to_half(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & kMagnitude32;
  const std::uint32_t rounded =
      std::min<std::uint32_t>(round_magnitude<10, 15>(magnitude), kInfinityHalf) |
      ((bits >> 16) & 0x8000u);
  return {static_cast<std::uint16_t>(select(magnitude > kInfinity32, kNan16, rounded))};
}

inline Brain to_brain(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<std::uint16_t>((bits & kMagnitude32) > kInfinity32 ? kNan16 : rounded)};
}

/// To a format of 8 bits; what is too large becomes the largest number.
template <int kFraction, int kBias, std::uint8_t kLargest>
std::uint8_t to_byte(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t magnitude = bits & kMagnitude32;
  const std::uint32_t rounded =
      std::min<std::uint32_t>(round_magnitude<kFraction, kBias>(magnitude), kLargest) |
      ((bits >> 24) & 0x80u);
  return static_cast<std::uint8_t>(select(magnitude > kInfinity32, kNan8, rounded));
}

inline std::uint8_t to_e4m3(float x) { return to_byte<3, 7, 0x7e>(x); }
inline std::uint8_t to_e5m2(float x) { return to_byte<2, 15, 0x7b>(x); }

inline Half half_of_e4m3(std::uint8_t byte) {
  const std::uint32_t magnitude = byte & 0x7fu;
  const std::uint32_t sign = (byte & 0x80u) << 8;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(widen_magnitude<3, 7>(magnitude));
  // Every number of e4m3 but zero is a normal half.
  const std::uint32_t half = select(magnitude == 0, 0, (bits - (112u << 23)) >> 13) | sign;
  return {static_cast<std::uint16_t>(select(magnitude == kNan8, kNan16, half))};
}

inline Half half_of_e5m2(std::uint8_t byte) {
  const bool is_nan = (byte & 0x7fu) > kInfinityHalf >> 8;
  return {
      static_cast<std::uint16_t>(select(is_nan, kNan16, static_cast<std::uint32_t>(byte) << 8))};
}

/// x if x is a float; otherwise the neighbouring float whose last bit is set. Rounding the result
/// to 16 bits gives the same as rounding x directly.
inline float narrow_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = nearest;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  const std::uint32_t is_inexact = (back < x) | (back > x);
  const std::uint32_t is_below = std::fabs(back) < std::fabs(x);
  const std::uint32_t moves = is_inexact & ~bits & 1;
  return std::bit_cast<float>(bits + 2 * (moves & is_below) - moves);
}

template <class T>
T narrow(double x);
template <>
inline Half narrow<Half>(double x) {
  return to_half(narrow_to_odd(x));
}
template <>
inline Brain narrow<Brain>(double x) {
  return to_brain(narrow_to_odd(x));
}

}  // namespace sonicmoe::emulator
