// Products of tcgen05.mma: what its descriptors say, and the product itself.
#pragma once

#include <array>
#include <cstdint>

#include "tensor_memory.h"
#include "wgmma.h"

namespace sonicmoe::emulator {

/// An instruction descriptor, with D in fp32.
struct UmmaShape {
  UmmaKind kind = UmmaKind::kF16;
  int m = 0, n = 0;
  ElementType type_a, type_b;
  Major major_a, major_b;
  int scale_a = 0, scale_b = 0;  ///< kMxf8: the bytes of columns that have the scales

  /// `ctas`: 1 or 2. Throws Fault for what the instruction does not have or the emulator does not
  /// know.
  static UmmaShape decode(std::uint32_t bits, UmmaKind kind, int ctas);

  int depth() const { return kDepthBytes / bytes_of(type_a); }
};

/// A matrix descriptor of sm_100. Throws Fault for reserved bits and for what is not emulated.
MatrixDescriptor decode_umma_matrix(std::uint64_t bits);

/// One tcgen05.mma. A CTA of a pair has half of the rows of A and D, and half of the columns of B.
struct Umma {
  /// Where a CTA has its part.
  struct Part {
    Cta* cta = nullptr;
    SharedMatrix a, b;
  };
  UmmaShape shape;
  int ctas = 1;
  std::array<Part, 2> parts;
  std::uint32_t column = 0;                  ///< where D begins
  std::uint32_t column_a = 0, column_b = 0;  ///< where the scales begin, of kMxf8
  bool accumulates = false;
  Stamp stamp;
  ClockCopy known;

  /// Columns of tensor memory that D has in each CTA.
  Columns columns() const { return {column, static_cast<std::uint32_t>(lane_columns())}; }
  /// Columns of tensor memory that the scales have in each CTA. A CTA has those of its rows of A
  /// and of all columns of B.
  Columns scales_a() const { return {column_a, scale_columns(shape.m / ctas)}; }
  Columns scales_b() const { return {column_b, scale_columns(lane_columns())}; }
  void run() const;

 private:
  /// Layout B of PTX: M = 128 for a pair. The right half of the columns is in lanes 64 to 127.
  bool has_halves() const { return ctas == 2 && shape.m == 128; }
  /// Columns of D that a lane has.
  int lane_columns() const { return has_halves() ? shape.n / 2 : shape.n; }
  /// A column has the scales of 32 rows of A, or of 32 columns of B, one in each lane.
  static std::uint32_t scale_columns(int count) {
    return static_cast<std::uint32_t>((count + kLanes - 1) / kLanes);
  }
  int lane_of(int row, int n) const;
  std::uint32_t& cell(int row, int n) const;
  void read_b(float* out) const;
  double scale(const Part& part, std::uint32_t first, int id, int quarter, int index) const;
  template <class F>
  void for_each_sum(int first, float* sums, const F& f) const;
  void add_scaled(const Part& part, int first, const float* sums) const;
};

}  // namespace sonicmoe::emulator
