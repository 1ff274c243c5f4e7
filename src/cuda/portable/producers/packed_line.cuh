// Unpacks weights of 4 bits inside a product: global memory has their codes only.
//
// In each k tile a thread unpacks 32 neighbouring elements of the packed tensor, whose 16 bytes of
// codes share one scale:
//
//   | order   | the 32 elements             | threads                         |
//   | K-major | all k of one column         | one for each column of the tile |
//   | other   | neighbouring columns, one k | 8 for each k of the tile        |
//
// They have only 16 different values. So the thread multiplies and rounds 16 times, and keeps the
// results as two tables, of low and of high bytes. A code selects a byte of each by prmt: no load
// from shared memory is needed.
#pragma once

#include <cstdint>

#include "core/packed_values.h"
#include "cuda/math/column_order.h"
#include "cuda/math/element.cuh"
#include "cuda/math/layouts.h"
#include "cuda/portable/engine/architecture.cuh"
#include "cuda/portable/params.h"
#include "cuda/portable/ptx/load.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/store16.cuh"

namespace sonicmoe::cuda::portable {

/// A thread's weights of the current k tile. fetch(), tabulate() and store() belong to one k tile,
/// advance() moves on. In a low-rank term the weights are the factor's elements: copy() is all.
template <class Shape, Major kMajor, ColumnOrder kOrder, class Element>
class PackedLine {
 public:
  /// Where the thread's elements are in a k tile: half() of the tile's columns, the first column()
  /// in this half, and the first k().
  static __device__ __forceinline__ int half() { return threadIdx.x / (Shape::kThreads / 2); }
  static __device__ __forceinline__ int column() {
    constexpr int kHalf = Shape::kColumns / 2;
    return kMajor == Major::kK ? line() % kHalf : slice() * kElements % kHalf;
  }
  static __device__ __forceinline__ int k() { return kMajor == Major::kK ? 0 : line(); }

  /// Begins a part of K. `m` are codes, or with `low_rank` elements, of the half of the tile that
  /// begins at `first_column`.
  __device__ __forceinline__ void open(const PackedTilesParams& p, const Matrices& m, int expert,
                                       int first_column, bool low_rank) {
    const int along = first_column + column();
    const std::int64_t in_matrix =
        kMajor == Major::kK ? along * m.line_bytes
                            : k() * m.line_bytes + along / kElements * (low_rank ? 64 : 16);
    const std::uint8_t* base = low_rank ? m.data : p.codes.codes;
    unit_ = static_cast<std::uint32_t>((m.data - base + expert * m.expert_bytes + in_matrix) / 16);
  }

  /// Copies the codes to the place of the last chunk that they become, and loads their scale; zeros
  /// if they do not exist.
  __device__ __forceinline__ void fetch(const PackedCodes& p, std::uint32_t stage,
                                        std::uint32_t exists) {
    ptx::copy_unit(target(stage, kChunks - 1), p.codes, unit_, exists);
    ptx::copies_commit();
    const std::uint32_t block = unit_ >> p.block_shift;
    scale_ = p.scale == ScaleKind::kFloat
                 ? ptx::load4(static_cast<const float*>(p.scales) + block, exists)
                 : ptx::load1(static_cast<const std::uint8_t*>(p.scales) + block, exists);
  }

  /// Copies the factor's elements, of which the first `chunks` chunks exist.
  __device__ __forceinline__ void copy(const Matrices& m, std::uint32_t stage, int chunks) const {
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
      ptx::copy_unit(target(stage, i), m.data, unit_ + i, i < chunks);
    }
  }

  /// Makes the tables of the block. If the thread's k does not exist, its weights become zeros, not
  /// NaN.
  __device__ __forceinline__ void tabulate(const PackedCodes& p, bool exists) {
    const float scale = exists ? scale_of(p) : 0.0f;
    std::uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      pairs[i] = Pair<Element>::pack(key::mul32(p.values[2 * i], scale),
                                     key::mul32(p.values[2 * i + 1], scale));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      low_[i] = ptx::select_bytes(pairs[2 * i], pairs[2 * i + 1], 0x6420u);
      high_[i] = ptx::select_bytes(pairs[2 * i], pairs[2 * i + 1], 0x7531u);
    }
  }

  /// Unpacks the elements and stores them. The last chunk replaces the codes. All chunks at once
  /// would spill registers in the code for 9.0.
  __device__ __forceinline__ void store(const PackedCodes& p, std::uint32_t stage) const {
    constexpr int kPairsAtOnce = kArchitecture == 90 ? 1 : kChunks / 2;
    ptx::groups_wait();
    const std::uint32_t codes = target(stage, kChunks - 1);
#pragma unroll(kPairsAtOnce)
    for (int i = 0; i < kChunks; i += 2) {
      std::uint32_t first, second;
      ptx::load_words(first, second, codes + i * 4);
      store_chunk(p, first, target(stage, i));
      store_chunk(p, second, target(stage, i + 1));
    }
  }

  /// Moves on to the next k tile.
  __device__ __forceinline__ void advance(const Matrices& m, bool low_rank) {
    unit_ += kMajor == Major::kK ? (low_rank ? kChunks : 1)
                                 : static_cast<std::uint32_t>(m.line_bytes / 16) * Shape::kDepth;
  }

 private:
  static constexpr int kElements = 32;
  static constexpr int kChunks = 4;
  static_assert(Shape::kDepth == kElements && Shape::kColumns == Shape::kThreads);

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
  /// Where chunk i of the thread's elements is in a stage: an XOR of one address.
  static __device__ __forceinline__ std::uint32_t target(std::uint32_t stage, int i) {
    const int first =
        kMajor == Major::kK
            ? line() * Shape::kLineBytes + (Shape::template swizzle<kOrder>(line()) << 4)
            : line() * Shape::kColumnChunks * 16 + ((slice() * kChunks ^ (line() & 7)) << 4);
    return stage + (first ^ i << 4);
  }

  __device__ __forceinline__ void store_chunk(const PackedCodes& p, std::uint32_t code,
                                              std::uint32_t to) const {
    const std::uint32_t index = code & 0x77777777u;  // in each half of a table
    const std::uint32_t half = (code >> 1 & 0x44444444u) | p.digits;
    const uint2 first = four(p, index, half);
    const uint2 second = four(p, index >> 16, half >> 16);
    ptx::store_shared16(to, make_uint4(first.x, first.y, second.x, second.y));
  }

  __device__ __forceinline__ float scale_of(const PackedCodes& p) const {
    if (p.scale == ScaleKind::kFloat) return __uint_as_float(scale_);
    if (p.scale == ScaleKind::kExponent) return packed::e8m0_of(scale_);
    const std::uint32_t nested = (unit_ >> p.block_shift) / packed::kNestedBlock;
    return packed::nested_absmax(p.nested_map[scale_], p.nested_scales[nested], *p.nested_offset);
  }

  /// The elements of the 4 codes of 16 bits.
  __device__ __forceinline__ uint2 four(const PackedCodes& p, std::uint32_t index,
                                        std::uint32_t half) const {
    const std::uint32_t low = ptx::select_bytes(ptx::select_bytes(low_[0], low_[1], index),
                                                ptx::select_bytes(low_[2], low_[3], index), half);
    const std::uint32_t high =
        ptx::select_bytes(ptx::select_bytes(high_[0], high_[1], index),
                          ptx::select_bytes(high_[2], high_[3], index), half);
    return make_uint2(ptx::select_bytes(low, high, p.order[0]),
                      ptx::select_bytes(low, high, p.order[1]));
  }

  std::uint32_t unit_;    ///< position, in 16 bytes of codes or of a factor's elements
  std::uint32_t scale_;   ///< fp32, or a byte
  std::uint32_t low_[4];  ///< low bytes of the 16 weights of the block
  std::uint32_t high_[4];
};

}  // namespace sonicmoe::cuda::portable
