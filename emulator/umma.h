// Products of tcgen05.mma: what its descriptors say, and the product itself.
#pragma once

#include <array>
#include <cstdint>

#include "tensor_memory.h"
#include "wgmma.h"

namespace sonicmoe::emulator {

/// The instruction descriptor of kind::f16, with D in fp32.
struct UmmaShape {
  int m = 0, n = 0;
  ElementType type_a, type_b;
  Major major_a, major_b;

  /// `ctas`: 1 or 2. Throws Fault for what the instruction does not have or the emulator does not
  /// know.
  static UmmaShape decode(std::uint32_t bits, int ctas);
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
  std::uint32_t column = 0;  ///< where D begins
  bool accumulates = false;
  Stamp stamp;
  ClockCopy known;

  /// Columns of tensor memory that D has in each CTA.
  Columns columns() const {
    const int count = has_halves() ? shape.n / 2 : shape.n;
    return {column, static_cast<std::uint32_t>(count)};
  }
  void run() const;

 private:
  /// Layout B of PTX: M = 128 for a pair. The right half of the columns is in lanes 64 to 127.
  bool has_halves() const { return ctas == 2 && shape.m == 128; }
  std::uint32_t& cell(int row, int n) const;
  void read_b(float* out) const;
};

}  // namespace sonicmoe::emulator
