// Quantises the block of 16 rows by 128 columns that a warp holds in registers: converts bf16 words
// to codes, with one scale for each row (core/fp8_quantize.h has the rule). A lane holds two rows,
// lane / 4 and lane / 4 + 8, and two of each eight columns (math/fragment.cuh).
#pragma once

#include "core/fp8_quantize.h"
#include "cuda/hopper/engine/staging.cuh"
#include "cuda/hopper/engine/tile.cuh"
#include "cuda/hopper/epilogues/ragged.cuh"
#include "cuda/hopper/fp8/scales.cuh"
#include "cuda/hopper/ptx/e4m3.cuh"
#include "cuda/math/element.cuh"
#include "cuda/math/fragment.cuh"
#include "cuda/ptx/lane.cuh"

namespace sonicmoe::cuda {

/// A lane's words of 16 rows by 128 columns of bf16: words 2i (first row) and 2i + 1 (second row)
/// hold its two of columns 8i .. 8i + 7.
struct BlockWords {
  Fragment half[2];
  __device__ __forceinline__ std::uint32_t& operator[](int i) { return half[i / 16][i % 16]; }
  __device__ __forceinline__ std::uint32_t operator[](int i) const { return half[i / 16][i % 16]; }
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
  __nv_bfloat162 most[2] = {__float2bfloat162_rn(0.0f), __float2bfloat162_rn(0.0f)};
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const std::uint32_t word = words[i];
    most[i & 1] = __hmax2(most[i & 1], __habs2(*reinterpret_cast<const __nv_bfloat162*>(&word)));
  }
  return of_both_columns(*reinterpret_cast<const std::uint32_t*>(&most[0]),
                         *reinterpret_cast<const std::uint32_t*>(&most[1]));
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

/// Whether the caller reads a block's words after they are quantised (kUsed) or not (kDone). Words
/// that are not read may be changed.
enum class Words { kDone, kUsed };

/// Returns `sum` + 0 * `word`: `sum`, with NaN where `word` is infinite. Infinities must get the
/// NaN code, but the conversion to e4m3 alone would saturate them to 448.
__device__ __forceinline__ __nv_bfloat162 without_infinities(__nv_bfloat162 word,
                                                             __nv_bfloat162 sum) {
  return __hfma2(word, __float2bfloat162_rn(0.0f), sum);
}

/// Computes the scales of the lane's two rows. With kDone, infinities in `words` become NaN.
template <Words kWords>
__device__ __forceinline__ void find_scales(float (&scale)[2], BlockWords& words) {
  std::uint32_t most = largest_of_rows(largest(words));
  if (__any_sync(~0u, not_finite(most) != 0)) {
    most = largest_of_rows(largest_finite(words));
    if constexpr (kWords == Words::kDone) {
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const auto word = *reinterpret_cast<const __nv_bfloat162*>(&words[i]);
        const __nv_bfloat162 finite = without_infinities(word, word);
        words[i] = *reinterpret_cast<const std::uint32_t*>(&finite);
      }
    }
  }
  scale[0] = fp8::scale_of(most << 16);
  scale[1] = fp8::scale_of(most & 0xffff0000u);
}

/// The two elements of a word times the inverse of the scale, in bf16. A product is exact unless it
/// is subnormal in bf16; then its code is 0, rounded or not.
template <Words kWords>
__device__ __forceinline__ std::uint32_t scaled(std::uint32_t word, __nv_bfloat162 inverse) {
  const auto value = *reinterpret_cast<const __nv_bfloat162*>(&word);
  __nv_bfloat162 product = __hmul2(value, inverse);
  if constexpr (kWords == Words::kUsed) product = without_infinities(value, product);
  return *reinterpret_cast<const std::uint32_t*>(&product);
}
/// The four codes of two words.
template <Words kWords>
__device__ __forceinline__ std::uint32_t codes_of(std::uint32_t first, std::uint32_t second,
                                                  __nv_bfloat162 inverse) {
  using Two = Pair<__nv_bfloat16>;
  first = scaled<kWords>(first, inverse);
  second = scaled<kWords>(second, inverse);
  return ptx::to_e4m3(Two::low(first), Two::high(first), Two::low(second), Two::high(second));
}

/// Reorders the codes of 32 columns of a row, four groups of eight columns, among the four lanes
/// that hold the row. Before, each lane has two codes of each group; after gather(), lane j of the
/// four has all eight codes of group j. This takes two exchanges. With (lane, group) for two codes,
/// lane 0 gets its codes as follows:
///
///   has (0, 0) (0, 1) (0, 2) (0, 3) | from lane 2: (2, 0) (2, 1) | from lane 1: (1, 0) (3, 0)
class GroupGatherer {
 public:
  __device__ __forceinline__ GroupGatherer() {
    const int lane = ptx::lane();
    const bool odd = (lane & 1) != 0;
    upper_ = (lane & 2) != 0;
    keep_ = odd ? 0x7632 : 0x5410;
    send_ = odd ? 0x5410 : 0x7632;
    const std::uint32_t own_lane_pair = odd ? 0x1054 : 0x5410;
    const std::uint32_t other_lane_pair = odd ? 0x3276 : 0x7632;
    low_ = upper_ ? other_lane_pair : own_lane_pair;
    high_ = upper_ ? own_lane_pair : other_lane_pair;
  }
  /// `first` has this lane's codes of groups 0 and 1, `second` those of groups 2 and 3.
  __device__ __forceinline__ uint2 gather(std::uint32_t first, std::uint32_t second) const {
    // Lanes l and l ^ 2 exchange: lanes 0 and 1 keep groups 0 and 1, lanes 2 and 3 groups 2 and 3.
    const std::uint32_t own = upper_ ? second : first;
    const std::uint32_t other = __shfl_xor_sync(~0u, upper_ ? first : second, 2);
    // Lanes l and l ^ 1 exchange: even lanes keep the group in the low halves.
    const std::uint32_t keep = __byte_perm(own, other, keep_);
    const std::uint32_t got = __shfl_xor_sync(~0u, __byte_perm(own, other, send_), 1);
    // The halves of `keep` are of lanes l and l ^ 2, those of `got` of lanes l ^ 1 and l ^ 3.
    return make_uint2(__byte_perm(keep, got, low_), __byte_perm(keep, got, high_));
  }

 private:
  bool upper_;
  std::uint32_t keep_, send_, low_, high_;  // selectors of __byte_perm
};

/// Quantises `words`, block `block` of the columns, and stores the codes and scales. Rows past the
/// expert's last row are not stored. Four lanes store 32 bytes of a row at once, from registers to
/// global memory: through store boxes, the warp would have to wait until the TMA has read them.
template <Words kWords>
__device__ __forceinline__ void store_quantized(const Fp8RowsOut& to, int block, BlockWords& words,
                                                const CtaTile& tile, Rows rows) {
  float scale[2];
  find_scales<kWords>(scale, words);
  const GroupGatherer gatherer;
  const int lane = ptx::lane();
  const int first_row = rows.offset + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
#pragma unroll
  for (int which = 0; which < 2; which++) {
    const int row = first_row + which * 8;
    const bool present = row < tile.valid_rows;
    std::uint8_t* at = to.codes + static_cast<std::int64_t>(tile.row + row) * to.row_bytes +
                       block * kFp8Block + (lane & 3) * 8;
    const __nv_bfloat162 inverse = __float2bfloat162_rn(fp8::inverse_of(scale[which]));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int word = i * 8 + which;
      const uint2 codes =
          gatherer.gather(codes_of<kWords>(words[word], words[word + 2], inverse),
                          codes_of<kWords>(words[word + 4], words[word + 6], inverse));
      if (present) *reinterpret_cast<uint2*>(at + i * 32) = codes;
    }
    if (present && (lane & 3) == 0) {
      to.scales[static_cast<std::int64_t>(block) * to.scale_rows + tile.row + row] = scale[which];
    }
  }
}

/// Writes the block's words to the boxes `box` and `box` + 1.
__device__ __forceinline__ void write_words(const Fp8Staging& staging, int box,
                                            const BlockWords& words) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    staging.write(box + half, words.half[half]);
  }
}

/// Issues the stores of the boxes `box` and `box` + 1 of elements, from `column` on.
__device__ __forceinline__ void issue_words(const RaggedMap& to, const Fp8Staging& staging, int box,
                                            int column, int part, const CtaTile& tile, Rows rows) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    store_ragged(to, staging.box(box + half), column + half * 64, part, tile, rows.offset);
  }
}

}  // namespace sonicmoe::cuda
