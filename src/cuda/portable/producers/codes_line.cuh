// The weights that a thread unpacks in each k tile: 32 neighbouring elements of the packed tensor,
// whose codes share one scale.
//
//   | order   | the 32 elements             | threads                         |
//   | K-major | all k of one column         | one for each column of the tile |
//   | other   | neighbouring columns, one k | 8 for each k of the tile        |
#pragma once

#include <cstdint>

#include "cuda/math/column_order.h"
#include "cuda/math/layouts.h"
#include "cuda/portable/engine/tile_slots.cuh"
#include "cuda/portable/params.h"
#include "cuda/portable/ptx/load.cuh"
#include "cuda/portable/shape.h"
#include "cuda/ptx/address.cuh"
#include "cuda/ptx/copy.cuh"

namespace sonicmoe::cuda::portable {

/// Where a thread's weights are. `kCodeBytes`: of its codes. They are copied to a buffer behind the
/// stages, one k tile before they are unpacked. The work of a k tile is divided into places,
/// between which the warp multiplies. In a low-rank term the weights are the factor's elements,
/// which copy() copies.
template <class Shape, Major kMajor, ColumnOrder kOrder, int kCodeBytes>
class CodesLine {
 public:
  static constexpr bool kIsPacked = true;
  /// Places of unpack() in classes that derive from this one. Those from kFirstStore on write to
  /// the stage; rows are copied from kFirstRow on.
  static constexpr int kPlaces = 32;
  static constexpr int kFirstStore = 10;
  static constexpr int kFirstRow = kFirstStore + 1;

  /// Where the thread's elements are in a k tile: half() of the tile's columns, the first column()
  /// in this half, and the first k().
  static __device__ __forceinline__ int half() { return threadIdx.x / (Shape::kThreads / 2); }
  static __device__ __forceinline__ int column() {
    constexpr int kHalf = Shape::kColumns / 2;
    return kMajor == Major::kK ? line() % kHalf : slice() * kElements % kHalf;
  }
  static __device__ __forceinline__ int k() { return kMajor == Major::kK ? 0 : line(); }

  /// Goes to the first elements of a factor, of the half of the tile that begins at `first_column`.
  __device__ __forceinline__ void open_factor(const Matrices& m, int expert, int first_column) {
    factor_ = unit_of(m, m.data, expert, first_column, kElements * kElementBytes);
  }
  /// Goes to the factor's elements of the next k tile.
  __device__ __forceinline__ void advance_factor(const Matrices& m) {
    factor_ += kMajor == Major::kK ? kChunks : lines(m);
  }
  /// Copies the factor's elements, of which the first `chunks` chunks exist.
  __device__ __forceinline__ void copy(const Matrices& m, std::uint32_t stage, int chunks) const {
    const std::uint8_t* from = m.data + std::uint64_t{factor_} * 16;
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
      ptx::copy16(target(stage, i), from + i * 16, i < chunks);
    }
  }

 protected:
  static constexpr int kElements = 32;
  static constexpr int kChunks = 4;                    ///< of 16 bytes, which the elements become
  static constexpr int kFirstChunk = kFirstStore + 2;  ///< place
  static_assert(Shape::kDepth == kElements && Shape::kColumns == Shape::kThreads);

  /// Goes to the first codes of a part of K; `base` is the beginning of all codes.
  __device__ __forceinline__ void open_units(const Matrices& m, const std::uint8_t* base,
                                             int expert, int first_column) {
    unit_ = unit_of(m, base, expert, first_column, kCodeBytes);
  }
  /// Goes to the codes of the next k tile.
  __device__ __forceinline__ void advance_units(const Matrices& m) {
    unit_ += kMajor == Major::kK ? kUnits : lines(m);
  }
  /// Copies codes to the buffer; zeros if they do not exist.
  __device__ __forceinline__ void copy_codes(const std::uint8_t* base, std::uint32_t exists) const {
#pragma unroll
    for (int i = 0; i < kUnits; i++) ptx::copy_unit(buffer(i), base, unit_ + i, exists);
    ptx::copies_commit();
  }

  /// Where unit i of the thread's codes is in the buffer.
  static __device__ __forceinline__ std::uint32_t buffer(int i) {
    return behind_stages() + (i * Shape::kThreads + threadIdx.x) * 16;
  }
  /// The address after the buffer.
  static __device__ __forceinline__ std::uint32_t behind_codes() {
    return behind_stages() + Shape::kThreads * kCodeBytes;
  }
  /// Where chunk i of the thread's elements is in a stage: an XOR of one address.
  static __device__ __forceinline__ std::uint32_t target(std::uint32_t stage, int i) {
    const int first =
        kMajor == Major::kK
            ? line() * Shape::kLineBytes + (Shape::template swizzle<kOrder>(line()) << 4)
            : line() * Shape::kColumnChunks * 16 + ((slice() * kChunks ^ (line() & 7)) << 4);
    // Otherwise the compiler keeps the addresses of all chunks in registers, which are not free.
    return stage + (ptx::computed_here(first) ^ i << 4);
  }

 private:
  static constexpr int kUnits = kCodeBytes / 16;

  /// The thread's line of the stage. The eight lanes that store at once have lines with different
  /// swizzles.
  static __device__ __forceinline__ int line() {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if constexpr (kMajor == Major::kMN) return (warp & 3) * 8 + (lane & 7);
    if constexpr (kOrder == ColumnOrder::kAscending) return threadIdx.x;
    return warp * 32 + ((lane & 1) | (lane << 2 & 24) | (lane >> 2 & 6));
  }
  /// For weights that are not K-major: which 32 columns of the tile.
  static __device__ __forceinline__ int slice() {
    return (threadIdx.x >> 7) * 4 + (threadIdx.x >> 3 & 3);
  }

  static __device__ __forceinline__ std::uint32_t behind_stages() {
    return ptx::shared_address(shared_memory()) + shared_bytes(Shape::kShape);
  }
  static __device__ __forceinline__ std::uint32_t lines(const Matrices& m) {
    return static_cast<std::uint32_t>(m.line_bytes / 16) * Shape::kDepth;
  }
  /// Position of the thread's first element, in 16 bytes; `run` are the bytes of kElements
  /// elements.
  static __device__ __forceinline__ std::uint32_t unit_of(const Matrices& m,
                                                          const std::uint8_t* base, int expert,
                                                          int first_column, int run) {
    const int along = first_column + column();
    const std::int64_t in_matrix =
        kMajor == Major::kK ? along * m.line_bytes : k() * m.line_bytes + along / kElements * run;
    return static_cast<std::uint32_t>((m.data - base + expert * m.expert_bytes + in_matrix) / 16);
  }

 protected:
  std::uint32_t unit_;  ///< position of the codes to fetch next, in 16 bytes

 private:
  std::uint32_t factor_;  ///< position in a factor, in 16 bytes
};

}  // namespace sonicmoe::cuda::portable
