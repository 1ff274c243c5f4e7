// The vocabulary of the checks: one rule per argument, one sentence per refusal.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "sonicmoe/types.h"

namespace sonicmoe::checks {

[[noreturn]] void refuse(const std::string& sentence);
[[noreturn]] void refuse(Status status, const std::string& sentence);

/// A set of element types, one bit each.
class DTypes {
 public:
  constexpr DTypes(DType one) : bits_(1u << static_cast<std::uint32_t>(one)) {}
  constexpr DTypes(std::initializer_list<DType> list) {
    for (DType t : list) bits_ |= 1u << static_cast<std::uint32_t>(t);
  }
  constexpr bool contains(DType t) const {
    const auto index = static_cast<std::uint32_t>(t);
    return index < 32u && (bits_ >> index & 1u) != 0;
  }
  std::string text() const;

 private:
  std::uint32_t bits_ = 0;
};
inline constexpr DTypes kFloats = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
inline constexpr DTypes kIndices = {DType::kI32, DType::kI64};

/// A dimension by its letter, so that a sentence can say both "(T, d)" and "(4, 8)".
struct Dim {
  const char* letter;
  std::int64_t size;
};
struct Shape {
  Shape(std::initializer_list<Dim> list) {
    for (const Dim& d : list) dims[rank++] = d;
  }
  std::int32_t rank = 0;
  Dim dims[3] = {};
};

/// Rank only, for tensors whose extents define T, E or R.
void rank(const Tensor& tensor, const char* name, const char* letters, std::int32_t rank);
/// Shape, dtype, data, size and the reach of the strides.
void input(const Tensor& tensor, const char* name, const Shape& shape, DTypes dtypes);
/// As input, and no two elements may share memory.
void output(const Tensor& tensor, const char* name, const Shape& shape, DTypes dtypes);
/// As output, for a parameter: its gradient has its strides.
void parameter(const Tensor& tensor, const char* name, const Shape& shape, DTypes dtypes);
/// An argument that has no meaning here, e.g. a gate for silu.
void absent(const Tensor& tensor, const std::string& name, const char* reason);

inline bool given(const Tensor& tensor) { return tensor.data != nullptr; }

// Every call passes dozens of these, so what holds is decided in place; only what does not leaves
// it.

[[noreturn]] void refuse_below(const char* name, std::int64_t value, std::int64_t least);
[[noreturn]] void refuse_past_31_bits(const char* name, std::int64_t value);
[[noreturn]] void refuse_not_finite(const char* name, double value);
[[noreturn]] void refuse_unknown(const char* name, std::int32_t value, std::int32_t count);
[[noreturn]] void refuse_product(const char* name, std::initializer_list<std::int64_t> factors,
                                 const char* limit);

inline void at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) refuse_below(name, value, least);
}

/// For counts and indices that are stored in 32 bits.
inline void below_2_31(const char* name, std::int64_t value) {
  if (value > INT32_MAX) refuse_past_31_bits(name, value);
}

/// Parameters are computed with in fp32.
inline void finite(const char* name, double value) {
  if (!(std::fabs(value) <= FLT_MAX)) refuse_not_finite(name, value);
}

inline void known(const char* name, std::int32_t value, std::int32_t count) {
  if (value < 0 || value >= count) refuse_unknown(name, value, count);
}

/// a*b*c, refused by name when it passes 2^63.
inline std::int64_t product(const char* name, std::initializer_list<std::int64_t> factors) {
  std::int64_t result = 1;
  for (std::int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) refuse_product(name, factors, "2^63");
  }
  return result;
}

/// No array and no stride reaches as many bytes, so that backends can add up a few dozen arrays,
/// step past an end by a few strides and pad a few times over without a check of their own.
inline constexpr std::int64_t kMostBytes = std::int64_t{1} << 55;

/// An array of the product's bytes, refused by name from kMostBytes on. A factor of 0 counts as 1:
/// the others are computed with even where the array is empty.
inline void array_bytes(const char* name, std::initializer_list<std::int64_t> factors) {
  std::int64_t result = 1;
  for (std::int64_t factor : factors) {
    if (__builtin_mul_overflow(result, std::max<std::int64_t>(factor, 1), &result) ||
        result >= kMostBytes) {
      refuse_product(name, factors, "2^55");
    }
  }
}

void buffer(const Buffer& buffer, const char* name, std::int64_t needed, const Exec& exec);

}  // namespace sonicmoe::checks
