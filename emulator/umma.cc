#include "umma.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

namespace sonicmoe::emulator {
namespace {

/// The reserved bits of an instruction descriptor, and those that are not emulated: sparsity, and
/// what only some kinds have.
constexpr std::uint32_t kReservedF16 = 0xe0800040 | 0xf, kReservedMxf8 = 0x87000040 | 0xf;

ElementType type_of(UmmaKind kind, std::uint32_t bits) {
  if (bits > 1) throw Fault("an instruction descriptor has a type that is not emulated");
  if (kind == UmmaKind::kF16) return bits == 1 ? ElementType::kBF16 : ElementType::kF16;
  return bits == 1 ? ElementType::kE5M2 : ElementType::kE4M3;
}

bool fits(const UmmaShape& s, int ctas) {
  const bool fits_m =
      ctas == 2 ? s.m == 128 || s.m == 256 : s.m == 128 || (s.kind == UmmaKind::kF16 && s.m == 64);
  int step = 16;
  if (ctas == 1 && (s.kind == UmmaKind::kMxf8 || s.m == 64)) step = 8;
  if (s.kind == UmmaKind::kMxf8 && s.major_b == Major::kMN) step = 16 * ctas;
  return fits_m && s.n > 0 && s.n <= kMostColumns && s.n % step == 0;
}

/// Of UE8M0.
double value_of_scale(std::uint32_t bits) {
  constexpr std::uint32_t kNanBits = 0xff;
  constexpr int kBias = 127;
  if (bits == kNanBits) return std::numeric_limits<double>::quiet_NaN();
  return std::ldexp(1.0, static_cast<int>(bits) - kBias);
}

}  // namespace

UmmaShape UmmaShape::decode(std::uint32_t d, UmmaKind kind, int ctas) {
  const auto bits = [d](int at, int count) { return d >> at & ((1u << count) - 1); };
  const auto number = [&](int at, int count) { return static_cast<int>(bits(at, count)); };
  const bool is_f16 = kind == UmmaKind::kF16;
  const std::uint32_t reserved = is_f16 ? kReservedF16 : kReservedMxf8;
  if ((d & reserved) != 0) {
    throw Fault("an instruction descriptor has bits that are reserved or not emulated");
  }
  if (bits(13, 2) != 0) throw Fault("the negation of A and B is not emulated");
  if (is_f16 && bits(4, 2) != 1) throw Fault("an instruction descriptor does not have D in fp32");
  if (!is_f16 && bits(23, 1) != 1) {
    throw Fault("an instruction descriptor does not have scales in UE8M0");
  }
  UmmaShape shape{kind,
                  number(24, 5) * 16,
                  number(17, 6) * 8,
                  type_of(kind, bits(7, 3)),
                  type_of(kind, bits(10, 3)),
                  static_cast<Major>(bits(15, 1)),
                  static_cast<Major>(bits(16, 1))};
  if (!is_f16) {
    shape.scale_a = number(29, 2);
    shape.scale_b = number(4, 2);
  }
  if (!fits(shape, ctas)) {
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
  alignas(64) float half[kMostDepth * kMostColumns];
  const int columns = shape.n / 2;
  for (int c = 0; c < 2; ++c) {
    SharedPass pass(*parts[c].cta, stamp, *known);
    read_matrix(parts[c].b, pass, 0, columns, half);
    for (int k = 0; k < shape.depth(); ++k) {
      for (int i = 0; i < columns; ++i) {
        out[k * shape.n + position_of(c * columns + i, shape.n)] =
            half[k * columns + position_of(i, columns)];
      }
    }
  }
}

/// Of D. Layouts of PTX: a row has the lane of its number (A and D), rows 16 i have the lanes from
/// 32 i (F: one CTA, M = 64), or has_halves() (B).
int Umma::lane_of(int row, int n) const {
  const int rows = shape.m / ctas;  // of a CTA
  const int in_cta = row % rows;
  if (shape.m == 64) return in_cta / 16 * 32 + in_cta % 16;
  return in_cta + n / lane_columns() * rows;
}

std::uint32_t& Umma::cell(int row, int n) const {
  return parts[row / (shape.m / ctas)].cta->tensor().cell(
      static_cast<std::uint32_t>(lane_of(row, n)),
      column + static_cast<std::uint32_t>(n % lane_columns()));
}

/// Calls f(cell of D, sum) for each of the rows from `first`.
template <class F>
void Umma::for_each_sum(int first, float* sums, const F& f) const {
  for (int r = 0; r < kProductRows; ++r) {
    for (int n = 0; n < shape.n; ++n) {
      f(&cell(first + r, n),
        sums + position_of(r, kProductRows) * shape.n + position_of(n, shape.n));
    }
  }
}

/// That of row or column `index`, as a quarter of the lanes has it.
double Umma::scale(const Part& part, std::uint32_t first, int id, int quarter, int index) const {
  const std::uint32_t bits =
      part.cta->tensor().cell(static_cast<std::uint32_t>(quarter * kLanes + index % kLanes),
                              first + static_cast<std::uint32_t>(index / kLanes));
  return value_of_scale(bits >> 8 * id & 0xff);
}

/// Adds sums of products, without their scales, to D or stores them. `first`: row.
void Umma::add_scaled(const Part& part, int first, const float* sums) const {
  for (int begin = 0; begin < shape.n; begin += lane_columns()) {
    // The rows are in one quarter.
    const int quarter = lane_of(first, begin) / kLanes;
    double of_b[kMostColumns];
    for (int i = 0; i < lane_columns(); ++i) {
      of_b[i] = scale(part, column_b, shape.scale_b, quarter, i);
    }
    for (int r = 0; r < kProductRows; ++r) {
      const int row = first + r;
      const double of_a = scale(part, column_a, shape.scale_a, quarter, row % (shape.m / ctas));
      const float* of_row = sums + position_of(r, kProductRows) * shape.n;
      std::uint32_t* cells = &cell(row, begin);
      for (int i = 0; i < lane_columns(); ++i) {
        const double old = accumulates ? std::bit_cast<float>(cells[i]) : 0;
        const double sum = old + of_row[position_of(begin + i, shape.n)] * of_a * of_b[i];
        cells[i] = std::bit_cast<std::uint32_t>(static_cast<float>(sum));
      }
    }
  }
}

void Umma::run() const {
  alignas(64) float left[kMostDepth * kProductRows];
  alignas(64) float right[kMostDepth * kMostColumns];
  alignas(64) float sums[kProductRows * kMostColumns];
  const bool is_scaled = shape.kind == UmmaKind::kMxf8;
  read_b(right);
  const int rows = shape.m / ctas;
  for (int first = 0; first < shape.m; first += kProductRows) {
    const Part& part = parts[first / rows];
    SharedPass pass(*part.cta, stamp, *known);
    read_matrix(part.a, pass, first % rows, kProductRows, left);
    if (accumulates && !is_scaled) {
      for_each_sum(first, sums,
                   [](std::uint32_t* bits, float* sum) { std::memcpy(sum, bits, sizeof *sum); });
    } else {
      std::memset(sums, 0, sizeof(float) * kProductRows * shape.n);
    }
    multiply_add(left, right, sums, shape.depth(), shape.n);
    if (is_scaled) {
      add_scaled(part, first, sums);
    } else {
      for_each_sum(first, sums,
                   [](std::uint32_t* bits, float* sum) { std::memcpy(bits, sum, sizeof *sum); });
    }
  }
}

}  // namespace sonicmoe::emulator
