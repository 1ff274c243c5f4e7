#include "verify/oracle_packed.h"

#include <cmath>
#include <limits>

#include "verify/convert.h"

namespace sonicmoe::oracle {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// The fp32 values nearest to these numbers are the values of NF4's codes.
constexpr double kNF4[16] = {-1.0,
                             -0.6961928009986877,
                             -0.5250730514526367,
                             -0.39491748809814453,
                             -0.28444138169288635,
                             -0.18477343022823334,
                             -0.09105003625154495,
                             0.0,
                             0.07958029955625534,
                             0.16093020141124725,
                             0.24611230194568634,
                             0.33791524171829224,
                             0.44070982933044434,
                             0.5626170039176941,
                             0.7229568362236023,
                             1.0};
constexpr double kE2M1[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};

double e4m3(int code) {
  if ((code & 0x7f) == 0x7f) return kNaN;
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

int byte_at(const Buffer& buffer, std::int64_t index) {
  return static_cast<const std::uint8_t*>(buffer.data)[index];
}
double float_at(const Buffer& buffer, std::int64_t index) {
  return static_cast<const float*>(buffer.data)[index];
}
double fp32(double v) { return round_to(DType::kF32, v); }

double absmax(const PackedWeights& p, std::int64_t block) {
  if (p.nested_map.data == nullptr) return float_at(p.scales, block);
  const double value = float_at(p.nested_map, byte_at(p.scales, block));
  return fp32(fp32(value * float_at(p.nested_scales, block / 256)) + float_at(p.nested_offset, 0));
}

double value(const PackedWeights& p, std::int64_t i) {
  if (p.format == PackedFormat::kFP8Blocks) return e4m3(byte_at(p.codes, i));
  const int byte = byte_at(p.codes, i / 2);
  if (p.format == PackedFormat::kNF4) {
    return fp32(kNF4[i % 2 == 0 ? byte / 16 : byte % 16]);
  }
  const int code = i % 2 == 0 ? byte % 16 : byte / 16;
  return code < 8 ? kE2M1[code] : -kE2M1[code - 8];
}

double scale(const PackedWeights& p, std::int64_t i) {
  if (p.format == PackedFormat::kNF4) return absmax(p, i / p.block);
  if (p.format == PackedFormat::kMXFP4) {
    const int exponent = byte_at(p.scales, i / 32);
    return exponent == 255 ? kNaN : std::ldexp(1.0, exponent - 127);
  }
  const std::int64_t column = i % p.columns, row = i / p.columns % p.rows;
  const std::int64_t expert = i / p.columns / p.rows;
  const std::int64_t down = (p.rows + 127) / 128, across = (p.columns + 127) / 128;
  return float_at(p.scales, (expert * down + row / 128) * across + column / 128);
}

}  // namespace

std::vector<double> unpack_weights(const PackedWeights& packed, DType dtype) {
  std::vector<double> out(static_cast<std::size_t>(packed.experts * packed.rows * packed.columns));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto at = static_cast<std::int64_t>(i);
    out[i] = round_to(dtype, fp32(value(packed, at) * scale(packed, at)));
  }
  return out;
}

}  // namespace sonicmoe::oracle
