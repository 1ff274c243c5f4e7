// Quantises the block of 16 rows by 128 columns that a warp holds in registers: converts bf16 words
// to codes, with one scale for each row (core/fp8_quantize.h has the rule). A lane holds elements
// of two rows, lane / 4 and lane / 4 + 8: eight neighbouring columns of each 32 columns
// (ColumnOrder::kByLane). So it stores eight codes or eight elements of a row at once, from
// registers to global memory.
#pragma once

#include "core/fp8_quantize.h"
#include "cuda/hopper/engine/staging.cuh"
#include "cuda/hopper/engine/tile.cuh"
#include "cuda/hopper/fp8/scales.cuh"
#include "cuda/hopper/ptx/thread.cuh"
#include "cuda/math/element.cuh"
#include "cuda/math/fragment.cuh"
#include "cuda/ptx/e4m3.cuh"
#include "cuda/ptx/global.cuh"
#include "cuda/ptx/lane.cuh"
#include "cuda/ptx/math.cuh"

namespace sonicmoe::cuda {

/// A lane's words of 16 rows by 128 columns of bf16. Of columns 32g .. 32g + 31 the lane has eight:
///
///   | words                          | hold                                          |
///   | 8g, 8g + 2, 8g + 4, 8g + 6     | the eight columns, in order, of its first row |
///   | 8g + 1, 8g + 3, 8g + 5, 8g + 7 | the same columns of its second row            |
struct BlockWords {
  std::uint32_t words[32];
  __device__ __forceinline__ std::uint32_t& operator[](int i) { return words[i]; }
  __device__ __forceinline__ std::uint32_t operator[](int i) const { return words[i]; }
};

using Fp8Staging = Staging<kFp8Tile>;

/// Each argument belongs to one of the lane's two rows: its halves are the maxima over even columns
/// and over odd columns. Returns the maximum of the first row in the low half of a word, that of
/// the second row in the high half.
__device__ __forceinline__ std::uint32_t of_both_columns(std::uint32_t first,
                                                         std::uint32_t second) {
  return __vmaxu2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
}
/// The largest absolute value in each of the two rows over the lane's columns, as bf16 bits.
/// Infinity counts; NaN is ignored.
__device__ __forceinline__ std::uint32_t largest(const BlockWords& words) {
  std::uint32_t most[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 32; i++) most[i & 1] = ptx::larger_magnitudes(most[i & 1], words[i]);
  return of_both_columns(most[0] & 0x7fff7fffu, most[1] & 0x7fff7fffu);
}
/// The maxima over all 128 columns, from the maxima of the four lanes that hold a row.
__device__ __forceinline__ std::uint32_t largest_of_rows(std::uint32_t own) {
  own = __vmaxu2(own, __shfl_xor_sync(~0u, own, 1));
  return __vmaxu2(own, __shfl_xor_sync(~0u, own, 2));
}

/// Returns 0xffff in each half whose bf16 value is infinite or NaN, and 0 in the others.
__device__ __forceinline__ std::uint32_t not_finite(std::uint32_t word) {
  return __vcmpgeu2(word & 0x7fff7fffu, 0x7f807f80u);
}

/// As largest(), but infinities are ignored too.
__device__ __forceinline__ std::uint32_t largest_finite(const BlockWords& words) {
  std::uint32_t most[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const std::uint32_t word = words[i] & 0x7fff7fffu;
    most[i & 1] = __vmaxu2(most[i & 1], word & ~not_finite(word));
  }
  return of_both_columns(most[0], most[1]);
}

/// Whether words may have infinities. Infinities must get the NaN code, but the conversion to e4m3
/// alone would saturate them to 448.
enum class Infinities { kNone, kPossible };

/// The two elements of a word times the inverse of the scale, in bf16. kPossible also turns
/// infinities into NaN. A product is exact unless it is subnormal in bf16; then its code is 0,
/// rounded or not.
template <Infinities kInfinities>
__device__ __forceinline__ std::uint32_t scaled(std::uint32_t word, __nv_bfloat162 inverse) {
  const auto value = *reinterpret_cast<const __nv_bfloat162*>(&word);
  __nv_bfloat162 product = __hmul2(value, inverse);
  if constexpr (kInfinities == Infinities::kPossible) {
    product = __hfma2(value, __float2bfloat162_rn(0.0f), product);
  }
  return *reinterpret_cast<const std::uint32_t*>(&product);
}
/// The four codes of two words.
template <Infinities kInfinities>
__device__ __forceinline__ std::uint32_t codes_of(std::uint32_t first, std::uint32_t second,
                                                  __nv_bfloat162 inverse) {
  using Two = Pair<__nv_bfloat16>;
  first = scaled<kInfinities>(first, inverse);
  second = scaled<kInfinities>(second, inverse);
  return ptx::to_e4m3(Two::low(first), Two::high(first), Two::low(second), Two::high(second));
}

/// The rows and columns of a block whose results a lane holds.
struct LanePlace {
  /// `columns`: those of the block that exist, 64 or at least 128.
  __device__ __forceinline__ LanePlace(const CtaTile& tile, Rows rows, int columns) {
    const int thread = ptx::thread();
    const int first = rows.offset + (thread >> 5 & 3) * 16 + (thread >> 2 & 7);
    row = tile.row + first;
    present[0] = first < tile.valid_rows;
    present[1] = first + 8 < tile.valid_rows;
    whole = columns >= kFp8Block;
    column = (thread & 3) * 8;
  }
  /// Whether row `which` has the lane's columns of group `group` of 32 columns.
  __device__ __forceinline__ bool has(int which, int group) const {
    return present[which] && (group < 2 || whole);
  }
  int row;          ///< in expert order; the second row is 8 rows further
  bool present[2];  ///< whether the two rows belong to the expert
  bool whole;       ///< whether the block has 128 columns; else it has 64
  int column;       ///< of each 32 columns, the first of the lane's eight
};

/// Where a lane stores elements of its two rows.
class LaneElements {
 public:
  __device__ __forceinline__ LaneElements(const Fp8ElementsOut& to, const LanePlace& place,
                                          int column) {
    at_[0] = to.data + place.row * to.row_stride + column;
    at_[1] = at_[0] + 8 * to.row_stride;
  }
  /// Stores eight elements, `words`, from element `offset` of a row on, if the row is present.
  __device__ __forceinline__ void store(bool present, int which, std::int64_t offset,
                                        uint4 words) const {
    ptx::store16_if(present, at_[which] + offset, words);
  }

 private:
  std::uint16_t* at_[2];
};

/// Where a block is stored in its rows: block `index` of their scales, from code `column` on.
struct CodeBlock {
  int index;
  int column;
};

/// Stores the codes and scales of a block. `largest` has the largest finite magnitudes of the
/// lane's two rows.
template <Infinities kInfinities>
__device__ __forceinline__ void store_codes(const Fp8RowsOut& to, CodeBlock block,
                                            const BlockWords& words, std::uint32_t largest,
                                            const LanePlace& place) {
  std::uint8_t* first =
      to.codes + static_cast<std::int64_t>(place.row) * to.row_bytes + block.column + place.column;
  float* scales = to.scales + static_cast<std::int64_t>(block.index) * to.scale_rows + place.row;
#pragma unroll
  for (int which = 0; which < 2; which++) {
    const float scale = fp8::scale_of(which == 0 ? largest << 16 : largest & 0xffff0000u);
    const __nv_bfloat162 inverse = __float2bfloat162_rn(fp8::inverse_of(scale));
    std::uint8_t* at = first + static_cast<std::int64_t>(which) * 8 * to.row_bytes;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int word = i * 8 + which;
      ptx::store8_if(place.has(which, i), at + i * 32,
                     make_uint2(codes_of<kInfinities>(words[word], words[word + 2], inverse),
                                codes_of<kInfinities>(words[word + 4], words[word + 6], inverse)));
    }
    if (place.present[which] && place.column == 0) scales[which * 8] = scale;
  }
}

/// Quantises `words`, the columns of `block`, and stores the codes and scales. Rows past the
/// expert's last row and columns that do not exist are not stored; the latter must be 0.
__device__ __forceinline__ void store_quantized(const Fp8RowsOut& to, CodeBlock block,
                                                const BlockWords& words, const LanePlace& place) {
  const std::uint32_t most = largest_of_rows(largest(words));
  if (__any_sync(~0u, not_finite(most) != 0)) {
    const std::uint32_t finite = largest_of_rows(largest_finite(words));
    store_codes<Infinities::kPossible>(to, block, words, finite, place);
  } else {
    store_codes<Infinities::kNone>(to, block, words, most, place);
  }
}

}  // namespace sonicmoe::cuda
