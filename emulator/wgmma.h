// Operands of wgmma and tcgen05.mma in shared memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "machine.h"
#include "matrix_product.h"

namespace sonicmoe::emulator {

/// The contiguous dimension of an operand.
enum class Major : std::uint32_t { kK, kMN };

/// A matrix descriptor, in bytes.
struct MatrixDescriptor {
  std::uint32_t start = 0;
  std::uint32_t leading = 0;
  std::uint32_t stride = 0;
  std::uint32_t span = 0;  ///< of the swizzle: 0, 32, 64 or 128

  /// Throws Fault for what is not emulated: a base offset.
  static MatrixDescriptor decode(std::uint64_t bits);
};

/// For reads whose warp has no fences that count in the CTA.
inline constexpr int kNoReader = -1;

struct SharedMatrix {
  const Cta* cta;
  const std::byte* memory;  ///< shared memory of the CTA
  std::size_t memory_bytes;
  int warp;  ///< that reads, or kNoReader
  MatrixDescriptor descriptor;
  Major major;
  ElementType type;
};

/// Bytes of K in one wgmma.
inline constexpr int kDepthBytes = 32;

/// Rows [first, first + count) of an operand, over all of K, as floats: out is (K, count), the rows
/// in the order of position_of(). Throws Fault outside of shared memory. `pass`: of matrix.cta.
void read_matrix(const SharedMatrix& matrix, SharedPass& pass, int first, int count, float* out);

/// The first 16 bytes of a row of a K-major operand.
void read_row_begin(const SharedMatrix& matrix, SharedPass& pass, int row, std::uint32_t* words);

}  // namespace sonicmoe::emulator
