// The rules from which the checks of every call are built. Each rule looks at one argument and
// refuses it with one sentence: the argument, the value that it has, the value that it must have.
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

/// A number as refusals print it: "1.5", "1e-09".
std::string number_text(double value);

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

/// A dimension and its letter: a refusal prints both "(T, d)" and "(4, 8)".
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

/// Checks the rank alone, for tensors whose extents define T, E or R.
void rank(const Tensor& tensor, const char* name, const char* letters, std::int32_t rank);
/// Checks shape, dtype, data pointer, size in bytes and the reach of the strides.
void input(const Tensor& tensor, const char* name, const Shape& shape, DTypes dtypes);
/// As input; also refuses a tensor in which two elements share memory.
void output(const Tensor& tensor, const char* name, const Shape& shape, DTypes dtypes);
/// As output, for a weight matrix: its gradient, which is written, may have the same strides.
void parameter(const Tensor& tensor, const char* name, const Shape& shape, DTypes dtypes);
/// Refuses an argument that has no meaning in the call, e.g. a gate for silu.
void absent(const Tensor& tensor, const std::string& name, const char* reason);

inline bool given(const Tensor& tensor) { return tensor.data != nullptr; }

// A call makes dozens of these checks. The comparison is inline, and only a refusal calls a
// function.

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

/// Refuses a value that is not finite in fp32, in which the backends use it.
inline void finite(const char* name, double value) {
  if (!(std::fabs(value) <= FLT_MAX)) refuse_not_finite(name, value);
}

inline void known(const char* name, std::int32_t value, std::int32_t count) {
  if (value < 0 || value >= count) refuse_unknown(name, value, count);
}

/// The product of the factors, refused by name from 2^63 on.
inline std::int64_t product(const char* name, std::initializer_list<std::int64_t> factors) {
  std::int64_t result = 1;
  for (std::int64_t factor : factors) {
    if (__builtin_mul_overflow(result, factor, &result)) refuse_product(name, factors, "2^63");
  }
  return result;
}

/// The limit of the bytes of any array and of the reach of any stride. It leaves a factor of 256 to
/// 2^63, so that a backend can add up dozens of arrays, step past an end by several strides and pad
/// sizes without a check of its own.
inline constexpr std::int64_t kMostBytes = std::int64_t{1} << 55;

/// Refuses, by name, an array whose bytes (the product of the factors) reach kMostBytes. A factor
/// of 0 counts as 1, because backends compute with the other factors even where the array is empty.
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
