#include "umma.h"

#include <cstring>
#include <string>

namespace sonicmoe::emulator {
namespace {

constexpr int kDepth = kDepthBytes / 2;  // K of kind::f16

}  // namespace

UmmaShape UmmaShape::decode(std::uint32_t d, int ctas) {
  const auto bits = [d](int at, int count) { return d >> at & ((1u << count) - 1); };
  if (bits(0, 4) != 0 || bits(6, 1) != 0 || bits(23, 1) != 0 || bits(29, 3) != 0) {
    throw Fault("an instruction descriptor has bits that are reserved or not emulated");
  }
  if (bits(13, 2) != 0) throw Fault("the negation of A and B is not emulated");
  if (bits(4, 2) != 1) throw Fault("an instruction descriptor does not have D in fp32");
  if (bits(7, 3) > 1 || bits(10, 3) > 1) {
    throw Fault("an instruction descriptor has a type that kind::f16 does not have");
  }
  const auto type = [](std::uint32_t t) { return t == 1 ? ElementType::kBF16 : ElementType::kF16; };
  const UmmaShape shape{static_cast<int>(bits(24, 5)) * 16,
                        static_cast<int>(bits(17, 6)) * 8,
                        type(bits(7, 3)),
                        type(bits(10, 3)),
                        static_cast<Major>(bits(15, 1)),
                        static_cast<Major>(bits(16, 1))};
  const bool fits_n = shape.n > 0 && shape.n <= kMostColumns &&
                      shape.n % (ctas == 1 && shape.m == 64 ? 8 : 16) == 0;
  const bool fits_m =
      ctas == 1 ? shape.m == 64 || shape.m == 128 : shape.m == 128 || shape.m == 256;
  if (!fits_m || !fits_n) {
    throw Fault("tcgen05.mma.cta_group::" + std::to_string(ctas) + " has no shape of M = " +
                std::to_string(shape.m) + " and N = " + std::to_string(shape.n));
  }
  return shape;
}

MatrixDescriptor decode_umma_matrix(std::uint64_t d) {
  const auto bits = [d](int at, int count) {
    return static_cast<std::uint32_t>(d >> at & ((1u << count) - 1));
  };
  if (bits(46, 3) != 1) throw Fault("bits 46 to 48 of a matrix descriptor are not 0b001");
  if (bits(49, 3) != 0) throw Fault("base offsets of matrix descriptors are not emulated");
  if (bits(52, 1) != 0) throw Fault("absolute strides of matrix descriptors are not emulated");
  if (bits(14, 2) != 0 || bits(30, 2) != 0 || bits(53, 8) != 0) {
    throw Fault("a matrix descriptor has reserved bits");
  }
  constexpr int kNone = -1;
  constexpr int kSpans[] = {0, kNone, 128, kNone, 64, kNone, 32, kNone};
  const int span = kSpans[bits(61, 3)];
  if (span == kNone) {
    throw Fault("a matrix descriptor has the swizzle " + std::to_string(bits(61, 3)) +
                ", which is invalid or not emulated");
  }
  constexpr std::uint32_t kUnit = 16;
  return {bits(0, 14) * kUnit, bits(16, 14) * kUnit, bits(32, 14) * kUnit,
          static_cast<std::uint32_t>(span)};
}

/// (K, N), from the CTAs' halves.
void Umma::read_b(float* out) const {
  if (ctas == 1) {
    SharedPass pass(*parts[0].cta, stamp, *known);
    return read_matrix(parts[0].b, pass, 0, shape.n, out);
  }
  alignas(64) float half[kDepth * kMostColumns];
  const int columns = shape.n / 2;
  for (int c = 0; c < 2; ++c) {
    SharedPass pass(*parts[c].cta, stamp, *known);
    read_matrix(parts[c].b, pass, 0, columns, half);
    for (int k = 0; k < kDepth; ++k) {
      for (int i = 0; i < columns; ++i) {
        out[k * shape.n + position_of(c * columns + i, shape.n)] =
            half[k * columns + position_of(i, columns)];
      }
    }
  }
}

/// Of D. Layouts of PTX: a row has the lane of its number (A and D), rows 16 i have the lanes from
/// 32 i (F: one CTA, M = 64), or has_halves() (B).
std::uint32_t& Umma::cell(int row, int n) const {
  const int rows = shape.m / ctas;  // of a CTA
  const int in_cta = row % rows;
  int lane = in_cta;
  if (shape.m == 64) lane = in_cta / 16 * 32 + in_cta % 16;
  if (has_halves()) {
    lane += n / (shape.n / 2) * rows;
    n %= shape.n / 2;
  }
  return parts[row / rows].cta->tensor().cell(static_cast<std::uint32_t>(lane),
                                              column + static_cast<std::uint32_t>(n));
}

void Umma::run() const {
  alignas(64) float left[kDepth * kProductRows];
  alignas(64) float right[kDepth * kMostColumns];
  alignas(64) float sums[kProductRows * kMostColumns];
  read_b(right);
  const int rows = shape.m / ctas;
  for (int first = 0; first < shape.m; first += kProductRows) {
    const Part& part = parts[first / rows];
    SharedPass pass(*part.cta, stamp, *known);
    read_matrix(part.a, pass, first % rows, kProductRows, left);
    const auto for_each_sum = [&](const auto& f) {
      for (int r = 0; r < kProductRows; ++r) {
        for (int n = 0; n < shape.n; ++n) {
          f(&cell(first + r, n),
            sums + position_of(r, kProductRows) * shape.n + position_of(n, shape.n));
        }
      }
    };
    if (accumulates) {
      for_each_sum([](std::uint32_t* bits, float* sum) { std::memcpy(sum, bits, sizeof *sum); });
    } else {
      std::memset(sums, 0, sizeof(float) * kProductRows * shape.n);
    }
    multiply_add(left, right, sums, kDepth, shape.n);
    for_each_sum([](std::uint32_t* bits, float* sum) { std::memcpy(bits, sum, sizeof *sum); });
  }
}

}  // namespace sonicmoe::emulator
