// Packed tensors for the tests of unpack_weights() on every backend: every byte value of codes and
// of E8M0 scales, and broken implementations that the comparison must reject.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "sonicmoe/packed.h"

namespace sonicmoe::testing {

/// A packed tensor and the host memory of its buffers.
struct PackedCase {
  std::string name;
  PackedFormat format = PackedFormat::kNF4;
  std::int64_t experts = 1, rows = 1, columns = 1, block = 0;
  std::vector<std::uint8_t> codes, scales, nested_map, nested_scales, nested_offset;

  std::int64_t elements() const { return experts * rows * columns; }
  /// `buffer` makes a Buffer of bytes; the result for an empty list is an absent buffer.
  template <class MakeBuffer>
  PackedWeights with(const MakeBuffer& buffer) const {
    return {format,
            experts,
            rows,
            columns,
            block,
            buffer(codes),
            buffer(scales),
            buffer(nested_map),
            buffer(nested_scales),
            buffer(nested_offset)};
  }
  PackedWeights on_host() const {
    return with([](const std::vector<std::uint8_t>& bytes) {
      const auto* data = bytes.empty() ? nullptr : bytes.data();
      return Buffer{const_cast<std::uint8_t*>(data), static_cast<std::int64_t>(bytes.size())};
    });
  }
};

inline std::vector<std::uint8_t> bytes_of(const std::vector<float>& values) {
  std::vector<std::uint8_t> bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

/// Every byte value in turn, from a different one in each case.
inline std::vector<std::uint8_t> every_byte(std::int64_t count, std::mt19937& random) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count));
  const auto first = random();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::uint8_t>(first + i + i / 256);
  }
  return bytes;
}

/// Scales of many magnitudes and both signs; the last is NaN, one is 0, one infinite.
inline std::vector<float> many_scales(std::int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (auto& v : values) {
    v = std::ldexp(normal(random), static_cast<int>(random() % 40) - 30);
  }
  values.back() = std::numeric_limits<float>::quiet_NaN();
  if (count > 3) values[1] = 0.0f;
  if (count > 3) values[2] = std::numeric_limits<float>::infinity();
  return values;
}

inline PackedCase nf4_case(std::int64_t experts, std::int64_t rows, std::int64_t columns,
                           std::int64_t block, bool nested) {
  std::mt19937 random(static_cast<unsigned>(experts + rows + columns + block));
  PackedCase c{nested ? "nf4_nested" : "nf4",
               PackedFormat::kNF4,
               experts,
               rows,
               columns,
               block,
               {},
               {},
               {},
               {},
               {}};
  c.name += "_" + std::to_string(block) + "_" + std::to_string(columns);
  c.codes = every_byte(c.elements() / 2, random);
  const std::int64_t blocks = c.elements() / block;
  if (!nested) {
    c.scales = bytes_of(many_scales(blocks, random));
    return c;
  }
  c.scales = every_byte(blocks, random);
  c.nested_map = bytes_of(many_scales(256, random));
  c.nested_scales = bytes_of(many_scales((blocks + 255) / 256, random));
  // NaN in the only nested scale would make everything NaN.
  if (blocks <= 256) c.nested_scales = bytes_of({0.37f});
  c.nested_offset = bytes_of({0.0213f});
  return c;
}

inline PackedCase mxfp4_case(std::int64_t experts, std::int64_t rows, std::int64_t columns) {
  std::mt19937 random(static_cast<unsigned>(experts + rows + columns));
  PackedCase c{"mxfp4_" + std::to_string(columns),
               PackedFormat::kMXFP4,
               experts,
               rows,
               columns,
               0,
               {},
               {},
               {},
               {},
               {}};
  c.codes = every_byte(c.elements() / 2, random);
  c.scales = every_byte(c.elements() / 32, random);
  return c;
}

inline PackedCase fp8_case(std::int64_t experts, std::int64_t rows, std::int64_t columns) {
  std::mt19937 random(static_cast<unsigned>(experts + rows + columns));
  PackedCase c{"fp8_" + std::to_string(columns),
               PackedFormat::kFP8Blocks,
               experts,
               rows,
               columns,
               0,
               {},
               {},
               {},
               {},
               {}};
  c.codes = every_byte(c.elements(), random);
  c.scales =
      bytes_of(many_scales(experts * ((rows + 127) / 128) * ((columns + 127) / 128), random));
  return c;
}

/// All sizes are served by every backend. E * columns / 32 is at least 256 for MXFP4.
inline std::vector<PackedCase> packed_cases() {
  return {nf4_case(3, 40, 192, 64, false),
          nf4_case(2, 33, 96, 32, false),
          nf4_case(2, 24, 4096, 4096, false),
          nf4_case(3, 104, 256, 64, true),
          nf4_case(2, 7, 32, 32, true),
          mxfp4_case(5, 13, 160),
          mxfp4_case(3, 200, 2880 / 5),
          fp8_case(2, 129, 272),
          fp8_case(3, 256, 128)};
}

/// Whether two lists of values are the same; NaN is equal to NaN.
inline bool same_values(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

/// A mistake of an implementation, as a change of what it reads.
struct PackedMistake {
  const char* name;
  std::function<bool(const PackedCase&)> concerns;
  std::function<void(PackedCase&)> make;
};

inline void rotate_floats(std::vector<std::uint8_t>& bytes) {
  std::rotate(bytes.begin(), bytes.begin() + 4, bytes.end());
}

inline std::vector<PackedMistake> packed_mistakes() {
  const auto four_bits = [](const PackedCase& c) { return c.format != PackedFormat::kFP8Blocks; };
  const auto nested = [](const PackedCase& c) { return !c.nested_map.empty(); };
  const auto fp32_scales = [](const PackedCase& c) {
    return c.format != PackedFormat::kMXFP4 && c.nested_map.empty();
  };
  const auto byte_scales = [fp32_scales](const PackedCase& c) { return !fp32_scales(c); };
  return {
      {"the codes of a byte are exchanged", four_bits,
       [](PackedCase& c) {
         for (auto& b : c.codes) b = static_cast<std::uint8_t>(b << 4 | b >> 4);
       }},
      {"the neighbour's scale", fp32_scales, [](PackedCase& c) { rotate_floats(c.scales); }},
      {"the neighbour's scale", byte_scales,
       [](PackedCase& c) { std::rotate(c.scales.begin(), c.scales.begin() + 1, c.scales.end()); }},
      {"a scale that is twice as large", fp32_scales,
       [](PackedCase& c) {
         float first = 0.0f;
         std::memcpy(&first, c.scales.data(), 4);
         first *= 2.0f;
         std::memcpy(c.scales.data(), &first, 4);
       }},
      {"a scale that is twice as large",
       [](const PackedCase& c) { return c.format == PackedFormat::kMXFP4; },
       [](PackedCase& c) { c.scales[5] = static_cast<std::uint8_t>(c.scales[5] + 1); }},
      {"the next entry of the map", nested, [](PackedCase& c) { rotate_floats(c.nested_map); }},
      {"the neighbour's nested scale",
       [nested](const PackedCase& c) { return nested(c) && c.nested_scales.size() > 4; },
       [](PackedCase& c) { rotate_floats(c.nested_scales); }},
      {"no offset", nested, [](PackedCase& c) { c.nested_offset = bytes_of({0.0f}); }},
  };
}

}  // namespace sonicmoe::testing
