#include "number_format.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

namespace sonicmoe::emulator {
namespace {

using Kind = NumberFormat::Kind;

/// Holds every number of every format exactly.
using Real = long double;
static_assert(std::numeric_limits<Real>::digits >= 64);

constexpr std::uint64_t kNoInfinity = 0;

constexpr NumberFormat kFormats[] = {
    {"u8", Kind::kUnsigned, 8},
    {"s8", Kind::kSigned, 8},
    {"u16", Kind::kUnsigned, 16},
    {"s16", Kind::kSigned, 16},
    {"u32", Kind::kUnsigned, 32},
    {"s32", Kind::kSigned, 32},
    {"u64", Kind::kUnsigned, 64},
    {"s64", Kind::kSigned, 64},
    {"e4m3", Kind::kFloat, 8, 4, -6, 448, kNoInfinity, 0x7f},
    {"e5m2", Kind::kFloat, 8, 3, -14, 57344, 0x7c, 0x7f},
    {"f16", Kind::kFloat, 16, 11, -14, 65504, 0x7c00, 0x7fff},
    {"bf16", Kind::kFloat, 16, 8, -126, 0x1.fep127, 0x7f80, 0x7fff},
    {"f32", Kind::kFloat, 32, 24, -126, std::numeric_limits<float>::max(), 0x7f800000, 0x7fffffff},
    {"f64", Kind::kFloat, 64, 53, -1022, std::numeric_limits<double>::max(), 0x7ff0'0000'0000'0000,
     0x7fff'ffff'ffff'ffff},
};

std::uint64_t low_bits(std::uint64_t value, int bits) {
  return bits == 64 ? value : value & ((std::uint64_t{1} << bits) - 1);
}

std::uint64_t extend(const NumberFormat& format, std::uint64_t value) {
  const int unused = 64 - format.bits;
  if (format.kind != Kind::kSigned) return low_bits(value, format.bits);
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(value << unused) >> unused);
}

Real decode_float(const NumberFormat& format, std::uint64_t bits) {
  const std::uint64_t magnitude = low_bits(bits, format.bits - 1);
  const bool is_negative = (bits >> (format.bits - 1) & 1) != 0;
  Real value;
  if (format.infinity == kNoInfinity ? magnitude == format.nan : magnitude > format.infinity) {
    return std::numeric_limits<Real>::quiet_NaN();
  }
  if (format.infinity != kNoInfinity && magnitude == format.infinity) {
    value = std::numeric_limits<Real>::infinity();
  } else {
    const int fraction_bits = format.digits - 1;
    const auto exponent = static_cast<int>(magnitude >> fraction_bits);
    std::uint64_t significand = low_bits(magnitude, fraction_bits);
    if (exponent != 0) significand |= std::uint64_t{1} << fraction_bits;
    value = std::ldexp(static_cast<Real>(significand),
                       format.least_exponent + std::max(exponent, 1) - 1 - fraction_bits);
  }
  return is_negative ? -value : value;
}

Real decode(const NumberFormat& format, std::uint64_t bits) {
  if (format.is_float()) return decode_float(format, bits);
  const std::uint64_t value = extend(format, bits);
  if (format.kind == Kind::kSigned) return static_cast<Real>(static_cast<std::int64_t>(value));
  return static_cast<Real>(value);
}

Real round_to_whole(Real value, Rounding rounding) {
  switch (rounding) {
    case Rounding::kZero:
      return std::trunc(value);
    case Rounding::kDown:
      return std::floor(value);
    case Rounding::kUp:
      return std::ceil(value);
    default:
      return std::nearbyint(value);
  }
}

/// The multiple of the format's last place; it may be larger than the format's largest number.
Real round_to_places(const NumberFormat& format, Real value, Rounding rounding) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int place = std::max(std::ilogb(value), format.least_exponent) - (format.digits - 1);
  const Real rounded = round_to_whole(std::ldexp(value, -place), rounding);
  return std::copysign(std::ldexp(rounded, place), value);
}

/// `value` is NaN or a number that has been rounded to the format's places.
std::uint64_t encode_float(const NumberFormat& format, Real value) {
  if (std::isnan(value)) return format.nan;
  const std::uint64_t sign = std::signbit(value) ? std::uint64_t{1} << (format.bits - 1) : 0;
  const Real magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  if (std::isinf(magnitude)) return sign | format.infinity;
  const int exponent = std::max(std::ilogb(magnitude), format.least_exponent);
  const int fraction_bits = format.digits - 1;
  const auto significand =
      static_cast<std::uint64_t>(std::ldexp(magnitude, fraction_bits - exponent));
  // The first bit of a normal number's significand adds one to the exponent's bits.
  const auto biased = static_cast<std::uint64_t>(exponent - format.least_exponent);
  return sign | ((biased << fraction_bits) + significand);
}

Real flush_subnormal(const NumberFormat& format, Real value) {
  const bool is_subnormal = std::fabs(value) < std::ldexp(Real{1}, format.least_exponent);
  return format.name == "f32" && is_subnormal ? std::copysign(Real{0}, value) : value;
}

/// The result for a rounded value beyond the format's largest number.
Real overflow(const NumberFormat& format, Real value, Rounding rounding) {
  const bool is_negative = std::signbit(value);
  const bool stays =
      rounding == Rounding::kZero || rounding == (is_negative ? Rounding::kUp : Rounding::kDown);
  const Real limit = stays ? Real{format.largest} : std::numeric_limits<Real>::infinity();
  return is_negative ? -limit : limit;
}

std::uint64_t to_float(const Conversion& how, Real value) {
  const NumberFormat& format = format_at(how.to);
  if (how.to_whole) value = round_to_whole(value, how.rounding);
  if (how.only_finite && !std::isnan(value)) {
    value = std::clamp<Real>(value, -format.largest, format.largest);
  }
  const bool was_finite = std::isfinite(value);
  value = round_to_places(format, value, how.rounding);
  if (was_finite && std::fabs(value) > format.largest) {
    value = overflow(format, value, how.rounding);
  }
  if (how.flush) value = flush_subnormal(format, value);
  if (how.saturate) value = value > 0 ? std::min<Real>(value, 1) : 0;
  if (how.rectify && std::signbit(value) && !std::isnan(value)) value = 0;
  return encode_float(format, value);
}

std::uint64_t to_integer(const Conversion& how, Real value) {
  const NumberFormat& format = format_at(how.to);
  const bool is_signed = format.kind == Kind::kSigned;
  if (std::isnan(value)) {
    const bool is_long = format.bits == 64 || format_at(how.from).bits == 64;
    return is_long ? std::uint64_t{1} << (format.bits - 1) : 0;
  }
  const Real largest = std::ldexp(Real{1}, format.bits - (is_signed ? 1 : 0)) - 1;
  const Real least = is_signed ? -largest - 1 : 0;
  value = std::clamp(round_to_whole(value, how.rounding), least, largest);
  if (is_signed) return static_cast<std::uint64_t>(static_cast<std::int64_t>(value));
  return static_cast<std::uint64_t>(value);
}

}  // namespace

int find_format(std::string_view name) {
  const auto found = std::find_if(std::begin(kFormats), std::end(kFormats),
                                  [&](const NumberFormat& f) { return f.name == name; });
  return found == std::end(kFormats) ? -1 : static_cast<int>(found - std::begin(kFormats));
}

const NumberFormat& format_at(int index) { return kFormats[index]; }

std::uint64_t Conversion::operator()(std::uint64_t source) const {
  const NumberFormat& old_format = format_at(from);
  const NumberFormat& new_format = format_at(to);
  if (!old_format.is_float() && !new_format.is_float() && !saturate) {
    return extend(new_format, extend(old_format, source));
  }
  Real value = decode(old_format, source);
  if (flush) value = flush_subnormal(old_format, value);
  if (new_format.is_float()) return to_float(*this, value);
  return extend(new_format, to_integer(*this, value));
}

}  // namespace sonicmoe::emulator
