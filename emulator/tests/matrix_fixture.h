// Matrices of small integers, whose products are exact, for the tests of matrix instructions.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "kernel_fixture.h"
#include "small_floats.h"
#include "wgmma.h"

namespace sonicmoe::emulator {

struct Type {
  const char* name;
  ElementType type;
  int bytes() const { return bytes_of(type); }
  int depth() const { return kDepthBytes / bytes(); }  ///< K of one wgmma
};

inline std::uint32_t bits_of(ElementType type, float value) {
  switch (type) {
    case ElementType::kBF16:
      return to_brain(value).bits;
    case ElementType::kF16:
      return to_half(value).bits;
    case ElementType::kE4M3:
      return to_e4m3(value);
    default:
      return to_e5m2(value);
  }
}

inline constexpr Type kBF16{"bf16", ElementType::kBF16};
inline constexpr Type kF16{"f16", ElementType::kF16};
inline constexpr Type kE4M3{"e4m3", ElementType::kE4M3};
inline constexpr Type kE5M2{"e5m2", ElementType::kE5M2};

/// (rows, depth), from -4 to 4.
inline std::vector<float> random_matrix(int rows, int depth, std::mt19937& random) {
  std::vector<float> values(static_cast<std::size_t>(rows) * depth);
  for (float& v : values) v = static_cast<float>(static_cast<int>(random() % 9) - 4);
  return values;
}

/// c + scale * A * B^T, by the definition.
inline std::vector<float> reference(const std::vector<float>& a, const std::vector<float>& b,
                                    int columns, int depth, float scale,
                                    const std::vector<float>& c) {
  std::vector<float> d = c;
  const int rows = static_cast<int>(a.size()) / depth;
  for (int r = 0; r < rows; ++r) {
    for (int n = 0; n < columns; ++n) {
      for (int k = 0; k < depth; ++k) {
        d[r * columns + n] += scale * a[r * depth + k] * b[n * depth + k];
      }
    }
  }
  return d;
}

/// {%r4, %r5, ...}
inline std::string registers(const std::string& prefix, int first, int count) {
  std::string text = "{";
  for (int i = 0; i < count; ++i) {
    text += (i == 0 ? "" : ", ") + prefix + std::to_string(first + i);
  }
  return text + "}";
}

}  // namespace sonicmoe::emulator
