// Conversions between any two formats of numbers, exact but slow.
#pragma once

#include <cstdint>
#include <string_view>

namespace sonicmoe::emulator {

/// How a number lies in its bits.
struct NumberFormat {
  std::string_view name;
  enum class Kind : std::uint8_t { kUnsigned, kSigned, kFloat } kind = Kind::kUnsigned;
  int bits = 0;
  int digits = 0;              ///< of a float's significand
  int least_exponent = 0;      ///< of its normal numbers
  double largest = 0;          ///< finite number
  std::uint64_t infinity = 0;  ///< its bits; 0: the format has none
  std::uint64_t nan = 0;

  bool is_float() const { return kind == Kind::kFloat; }
};

/// The place of a format in the list of all; -1: none has this name.
int find_format(std::string_view name);
const NumberFormat& format_at(int index);

enum class Rounding : std::uint8_t { kNearest, kZero, kDown, kUp };

struct Conversion {
  std::uint8_t from = 0;  ///< places of formats
  std::uint8_t to = 0;
  Rounding rounding = Rounding::kNearest;
  bool to_whole = false;     ///< .rni, .rzi, .rmi, .rpi: a float becomes a whole number
  bool flush = false;        ///< .ftz
  bool saturate = false;     ///< .sat
  bool only_finite = false;  ///< .satfinite
  bool rectify = false;      ///< .relu

  /// The bits of the number whose bits, with others above them, are `source`. Results of signed
  /// formats are extended to 64 bits.
  std::uint64_t operator()(std::uint64_t source) const;
};

}  // namespace sonicmoe::emulator
