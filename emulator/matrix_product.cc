#include "matrix_product.h"

#include <bit>
#include <cstring>

#include "small_floats.h"

namespace sonicmoe::emulator {
namespace {

using Floats4 __attribute__((vector_size(16))) = float;
using Floats8 __attribute__((vector_size(32))) = float;
using Floats16 __attribute__((vector_size(64))) = float;

using Multiply = void (*)(const float*, const float*, float*, int, int);

/// Blocks of kRows rows by two vectors of columns, which the compiler keeps in registers.
template <class Vector, int kRows>
__attribute__((always_inline)) inline void multiply_blocks(const float* a, const float* b,
                                                           float* sums, int depth, int columns) {
  constexpr int kWidth = sizeof(Vector) / sizeof(float);
  for (int column = 0; column < columns; column += 2 * kWidth) {
    for (int row = 0; row < kProductRows; row += kRows) {
      Vector block[kRows][2];
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < 2; ++v) {
          block[r][v] =
              *reinterpret_cast<const Vector*>(sums + (row + r) * columns + column + v * kWidth);
        }
      }
      for (int k = 0; k < depth; ++k) {
        const float* at = b + k * columns + column;
        const Vector b0 = *reinterpret_cast<const Vector*>(at);
        const Vector b1 = *reinterpret_cast<const Vector*>(at + kWidth);
        for (int r = 0; r < kRows; ++r) {
          const float factor = a[k * kProductRows + row + r];
          block[r][0] += factor * b0;
          block[r][1] += factor * b1;
        }
      }
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < 2; ++v) {
          *reinterpret_cast<Vector*>(sums + (row + r) * columns + column + v * kWidth) =
              block[r][v];
        }
      }
    }
  }
}

void multiply_any(const float* a, const float* b, float* sums, int depth, int columns) {
  multiply_blocks<Floats4, 4>(a, b, sums, depth, columns);
}

__attribute__((target("avx2,fma"))) void multiply_avx2(const float* a, const float* b, float* sums,
                                                       int depth, int columns) {
  multiply_blocks<Floats8, 4>(a, b, sums, depth, columns);
}

__attribute__((target("avx512f"))) void multiply_avx512(const float* a, const float* b, float* sums,
                                                        int depth, int columns) {
  multiply_blocks<Floats16, 8>(a, b, sums, depth, columns);
}

constexpr int kFractionBits = 23;  // of a float
constexpr int kNarrowBits = 13;    // of the fraction of a sum of 14 bits

using Ints4 __attribute__((vector_size(16))) = std::int32_t;
using Ints8 __attribute__((vector_size(32))) = std::int32_t;

/// Terms are counted in integers, in units of the last bit that is kept.
template <class Vector, class Ints>
__attribute__((always_inline)) inline void multiply_narrow(const float* a, const float* b,
                                                           float* sums, int depth, int columns) {
  constexpr int kWidth = sizeof(Vector) / sizeof(float);
  constexpr std::int32_t kMagnitude = 0x7fffffff;
  constexpr std::int32_t kExponent = 0xff << kFractionBits;
  // No sum other than 0 is as small: the least product of e5m2 is 2^-32.
  constexpr std::int32_t kLeast = (127 - 64) << kFractionBits;
  for (int column = 0; column < columns; column += kWidth) {
    for (int row = 0; row < kProductRows; ++row) {
      auto* at = reinterpret_cast<Vector*>(sums + row * columns + column);
      Vector terms[kMostDepth + 1];
      Vector plain_sum = terms[depth] = *at;
      Ints most = (Ints)*at & kMagnitude;
      for (int k = 0; k < depth; ++k) {
        const auto& right = *reinterpret_cast<const Vector*>(b + k * columns + column);
        plain_sum += terms[k] = a[k * kProductRows + row] * right;
        const Ints bits = (Ints)terms[k] & kMagnitude;
        most = bits > most ? bits : most;
      }
      Ints power = most & kExponent;
      const Ints is_finite = power != kExponent;
      power = power > kLeast ? power : kLeast;
      const auto unit = (Vector)(power - (kNarrowBits << kFractionBits));
      const auto units =  // 1 / unit
          (Vector)((254 << kFractionBits) - power + (kNarrowBits << kFractionBits));
      Ints count = {};
      for (int k = 0; k <= depth; ++k) {
        const auto finite = (Vector)((Ints)terms[k] & is_finite);
        count += __builtin_convertvector(finite * units, Ints);
      }
      const Vector sum = __builtin_convertvector(count, Vector) * unit;
      const Ints narrow = (Ints)sum & ~((1 << (kFractionBits - kNarrowBits)) - 1);
      *at = (Vector)((narrow & is_finite) | ((Ints)plain_sum & ~is_finite));
    }
  }
}

void multiply_narrow_any(const float* a, const float* b, float* sums, int depth, int columns) {
  multiply_narrow<Floats4, Ints4>(a, b, sums, depth, columns);
}

__attribute__((target("avx2"))) void multiply_narrow_avx2(const float* a, const float* b,
                                                          float* sums, int depth, int columns) {
  multiply_narrow<Floats8, Ints8>(a, b, sums, depth, columns);
}

/// The float with the magnitude `m` of a smaller format, infinity and NaN apart. Without branches,
/// so that loops become vector code.
template <int kFraction, int kBias>
std::uint32_t widen_finite(std::uint32_t m) {
  constexpr std::uint32_t kRebias = (127u - kBias) << kFractionBits;
  const std::uint32_t normal = (m << (kFractionBits - kFraction)) + kRebias;
  const float units = static_cast<float>(static_cast<std::int32_t>(m));
  const auto subnormal = std::bit_cast<std::uint32_t>(units * power_of_two(1 - kBias - kFraction));
  const std::uint32_t is_subnormal = 0u - static_cast<std::uint32_t>(m < 1u << kFraction);
  return (normal & ~is_subnormal) | (subnormal & is_subnormal);
}

// The element in the lowest bits of a word.

struct WidenBF16 {
  float operator()(std::uint32_t word) const { return std::bit_cast<float>(word << 16); }
};

struct WidenF16 {
  float operator()(std::uint32_t word) const {
    const std::uint32_t m = word & 0x7fff;
    // Infinity and NaN have the largest exponent in both formats.
    const std::uint32_t is_special = 0u - static_cast<std::uint32_t>(m >= kInfinityHalf);
    const std::uint32_t bits = widen_finite<10, 15>(m) | (is_special & kInfinity32);
    return std::bit_cast<float>(bits | (word & 0x8000) << 16);
  }
};

struct WidenE5M2 {
  float operator()(std::uint32_t word) const { return WidenF16()(word << 8); }
};

struct WidenE4M3 {
  float operator()(std::uint32_t word) const {
    const std::uint32_t m = word & 0x7f;
    const std::uint32_t is_nan = 0u - static_cast<std::uint32_t>(m == kNan8);
    const std::uint32_t bits = widen_finite<3, 7>(m) | (is_nan & kNan32);
    return std::bit_cast<float>(bits | (word & 0x80) << 24);
  }
};

template <int kElements, class Widen>
__attribute__((always_inline)) inline void widen_all(const std::uint32_t* words, int count,
                                                     int stride, float* out) {
  for (int e = 0; e < kElements; ++e) {
    const int shift = e * (32 / kElements);
    for (int i = 0; i < count; ++i) out[e * stride + i] = Widen()(words[i] >> shift);
  }
}

template <int kElements, class Widen>
void widen_any(const std::uint32_t* words, int count, int stride, float* out) {
  widen_all<kElements, Widen>(words, count, stride, out);
}

template <int kElements, class Widen>
__attribute__((target("avx2"), flatten)) void widen_avx2(const std::uint32_t* words, int count,
                                                         int stride, float* out) {
  widen_all<kElements, Widen>(words, count, stride, out);
}

/// Calls f(four lanes of a register, four sums) for all of them.
template <class Sums, class F>
void for_each_quad(Warp& warp, const Slot* registers, int columns, Sums* sums, const F& f) {
  constexpr int kRegisterRows = 8;
  for (int i = 0; i < columns / 2; ++i) {
    float* lanes = warp.lanes_of<float>(registers[i]);
    Sums* at = sums + (i & 1) * (columns / 2) + i / 4 * 4;
    for (int r = 0; r < kRegisterRows; ++r) {
      const int row = position_of((i >> 1 & 1) * kRegisterRows + r, kProductRows);
      f(lanes + 4 * r, at + row * columns);
    }
  }
}

constexpr std::size_t kQuadBytes = 4 * sizeof(float);

}  // namespace

void multiply_add(const float* a, const float* b, float* sums, int depth, int columns) {
  static const bool has_avx512 = __builtin_cpu_supports("avx512f");
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  Multiply multiply = &multiply_any;
  if (has_avx2 && columns % 16 == 0) multiply = &multiply_avx2;
  if (has_avx512 && columns % 32 == 0) multiply = &multiply_avx512;
  multiply(a, b, sums, depth, columns);
}

void multiply_add_14_bits(const float* a, const float* b, float* sums, int depth, int columns) {
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  (has_avx2 ? &multiply_narrow_avx2 : &multiply_narrow_any)(a, b, sums, depth, columns);
}

void load_sums(Warp& warp, const Slot* registers, int columns, float* sums) {
  for_each_quad(warp, registers, columns, sums,
                [](const float* lanes, float* to) { std::memcpy(to, lanes, kQuadBytes); });
}

void store_sums(Warp& warp, const Slot* registers, int columns, const float* sums) {
  for_each_quad(warp, registers, columns, sums,
                [](float* lanes, const float* from) { std::memcpy(lanes, from, kQuadBytes); });
}

void widen_words(ElementType type, const std::uint32_t* words, int count, int stride, float* out) {
  using Function = void (*)(const std::uint32_t*, int, int, float*);
  static constexpr Function kAny[] = {&widen_any<2, WidenBF16>, &widen_any<2, WidenF16>,
                                      &widen_any<4, WidenE4M3>, &widen_any<4, WidenE5M2>};
  static constexpr Function kAvx2[] = {&widen_avx2<2, WidenBF16>, &widen_avx2<2, WidenF16>,
                                       &widen_avx2<4, WidenE4M3>, &widen_avx2<4, WidenE5M2>};
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  (has_avx2 ? kAvx2 : kAny)[static_cast<int>(type)](words, count, stride, out);
}

}  // namespace sonicmoe::emulator
