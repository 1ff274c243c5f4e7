// Loads operands from a pipeline stage into the fragments of mma.sync.
//
// A k tile has the same lines in shared memory as in global memory. A line is divided into chunks
// of 16 bytes. The chunks are swizzled, so that the eight chunks of an 8x8 matrix are in different
// banks.
//
//   | order   | line                         | chunk c of line i is at |
//   | K-major | 32 or 64 of K: 4 or 8 chunks | c ^ Shape::swizzle(i)   |
//   | other   | 128 or 256 rows or columns   | c ^ (i % 8)             |
//
// The addresses of a lane's matrices follow from one base by an XOR with a constant and by adding a
// constant, which the compiler folds into the instruction.
#pragma once

#include <cstdint>

#include "cuda/math/layouts.h"
#include "cuda/portable/ptx/mma.cuh"
#include "cuda/portable/shape.h"
#include "cuda/ptx/matrix.cuh"

namespace sonicmoe::cuda::portable {

/// The position of a thread's warp in the CTA's tile.
struct Warp {
  __device__ __forceinline__ explicit Warp(int along_columns)
      : lane(threadIdx.x & 31),
        row((threadIdx.x >> 5) / along_columns),
        column((threadIdx.x >> 5) % along_columns) {}

  int lane;
  int row;
  int column;
};

/// Which 64 columns of the tile a warp computes: 64 neighbours, or 32 of each half of the tile.
/// With kHalves a thread has the gate and the up value of a column.
enum class Columns { kNeighbours, kHalves };

/// Loads the operand of a warp's 64 rows of D: 4 fragments of 16 x 16.
template <class Shape, Major kMajor>
class FragmentsA {
 public:
  __device__ __forceinline__ explicit FragmentsA(const Warp& warp) {
    const int lane = warp.lane;
    if constexpr (kMajor == Major::kK) {
      const int row = lane & 15;
      base_ = (warp.row * kWarpRows + row) * Shape::kLineBytes +
              (((lane >> 4) ^ Shape::swizzle(row)) << 4);
    } else {
      const int k = (lane & 7) + (lane >> 4) * 8;
      base_ =
          k * kTileRows * kElementBytes + ((warp.row * 8 + ((lane >> 3 & 1) ^ (lane & 7))) << 4);
    }
  }

  template <int kStep>
  __device__ __forceinline__ void load(std::uint32_t (&a)[4][4], std::uint32_t stage) const {
#pragma unroll
    for (int i = 0; i < 4; i++) load_fragment<kStep>(a[i], stage, i);
  }
  template <int kStep>
  __device__ __forceinline__ void load_fragment(std::uint32_t (&a)[4], std::uint32_t stage,
                                                int i) const {
    if constexpr (kMajor == Major::kK) {
      ptx::load_matrices(a, stage + (base_ ^ (kStep << 5)) + i * 16 * Shape::kLineBytes);
    } else {
      ptx::load_matrices_transposed(
          a, stage + (base_ ^ (i << 5)) + kStep * 16 * kTileRows * kElementBytes);
    }
  }

 private:
  std::uint32_t base_;
};

/// Loads the operand of a warp's 64 columns of D: 8 fragments of 16 x 8; b[i] holds two of them.
/// With ColumnOrder::kByLane, 4 fragments have 32 neighbouring columns in the order of column_of().
template <class Shape, Major kMajor, Columns kColumns, ColumnOrder kColumnOrder>
class FragmentsB {
 public:
  __device__ __forceinline__ explicit FragmentsB(const Warp& warp) {
    const int lane = warp.lane;
    const int first = warp.column * (kColumns == Columns::kHalves ? 32 : 64);
    if constexpr (kMajor == Major::kK) {
      const int column = first + column_of(lane & 7, lane >> 4);
      base_ = Shape::kBytesA + column * Shape::kLineBytes +
              (((lane >> 3 & 1) ^ Shape::template swizzle<kColumnOrder>(column)) << 4);
    } else {
      const int k = (lane & 7) + (lane >> 3 & 1) * 8;
      const int chunk = first / 8 + (lane >> 4);
      base_ = Shape::kBytesA + k * Shape::kColumns * kElementBytes + ((chunk ^ (lane & 7)) << 4);
    }
  }

  template <int kStep>
  __device__ __forceinline__ void load(std::uint32_t (&b)[4][4], std::uint32_t stage) const {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      constexpr bool kHalves = kColumns == Columns::kHalves;
      const int near = kHalves ? i & 1 : i;
      const int far = kHalves ? i >> 1 : 0;
      if constexpr (kMajor == Major::kK) {
        const int column =
            column_of(0, 2 * (i & 1)) + (i >> 1) * (kHalves ? Shape::kColumns / 2 : 32);
        ptx::load_matrices(b[i], stage + (base_ ^ (kStep << 5)) + column * Shape::kLineBytes);
      } else {
        const std::uint32_t at = stage + (base_ ^ (near << 5));
        ptx::load_matrices_transposed(b[i], at + kStep * 16 * Shape::kColumns * kElementBytes +
                                                far * Shape::kColumns / 2 * kElementBytes);
      }
    }
  }

 private:
  static_assert(kColumnOrder == ColumnOrder::kAscending || kMajor == Major::kK);

  /// The index, among 32 columns, of column i of fragment j.
  static constexpr int column_of(int i, int j) {
    return kColumnOrder == ColumnOrder::kByLane ? i / 2 * 8 + i % 2 + j * 2 : i + j * 8;
  }

  std::uint32_t base_;
};

/// 64 x 64 elements of D. acc[i][j] has 16 rows from 16i on, and the 8 columns of fragment j of
/// FragmentsB (math/fragment.cuh): with ColumnOrder::kAscending those from 8j on.
using Accumulators = float[4][8][4];

/// A warp's operand for 16 of K: 4 fragments of A, or 8 of B.
using Operand = std::uint32_t[4][4];

/// Issues the mma.sync of 16 of K. After every second it calls between<i>(), i = 0 to 15.
template <class Element, class Between>
__device__ __forceinline__ void multiply_add(Accumulators& acc, const Operand& a, const Operand& b,
                                             const Between& between) {
  const auto rows = [&]<int i>() {
    const auto columns = [&]<int j>() {
      ptx::multiply_add<Element>(acc[i][2 * j], a[i], &b[j][0]);
      ptx::multiply_add<Element>(acc[i][2 * j + 1], a[i], &b[j][2]);
      between.template operator()<4 * i + j>();
    };
    columns.template operator()<0>();
    columns.template operator()<1>();
    columns.template operator()<2>();
    columns.template operator()<3>();
  };
  rows.template operator()<0>();
  rows.template operator()<1>();
  rows.template operator()<2>();
  rows.template operator()<3>();
}

}  // namespace sonicmoe::cuda::portable
