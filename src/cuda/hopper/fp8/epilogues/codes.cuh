// Quantises the block of 16 rows by 128 columns that a warp holds: bf16 words become codes and one
// scale for each row (core/fp8_quantize.h has the rule).
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
#include "cuda/ptx/shared.cuh"

namespace sonicmoe::cuda {

/// 16 rows by 128 columns of bf16: words 2i and 2i + 1 hold columns 8i .. 8i + 7.
struct BlockWords {
  Fragment half[2];
  __device__ __forceinline__ std::uint32_t& operator[](int i) { return half[i / 16][i % 16]; }
  __device__ __forceinline__ std::uint32_t operator[](int i) const { return half[i / 16][i % 16]; }
};

using Fp8Staging = Staging<kFp8Tile>;

/// The scales of a lane's two rows.
using RowScales = float[2];

/// Takes, for each of the lane's two rows, a word with the maxima of even and of odd columns.
/// Returns the maximum of the first row in the low half and the maximum of the second row in the
/// high half.
__device__ __forceinline__ std::uint32_t of_both_columns(std::uint32_t first,
                                                         std::uint32_t second) {
  return __vmaxu2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
}
/// Largest absolute values of both rows over the lane's columns, as bf16 bits; infinity counts, NaN
/// does not.
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
/// The maxima over all columns of the block, which four lanes hold.
__device__ __forceinline__ std::uint32_t largest_of_rows(std::uint32_t own) {
  own = __vmaxu2(own, __shfl_xor_sync(~0u, own, 1));
  return __vmaxu2(own, __shfl_xor_sync(~0u, own, 2));
}

/// 0xffff in each half of a word that is infinite or NaN.
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

/// The two codes of a word: its two elements times the inverse of the scale, converted to e4m3. A
/// product is exact in bf16 unless it is subnormal, and then its code is 0 in any case. The
/// conversion alone would turn infinity into 448; adding 0 times the element makes infinity NaN and
/// changes no finite value.
__device__ __forceinline__ std::uint32_t codes_of(std::uint32_t word, __nv_bfloat162 inverse) {
  const auto value = *reinterpret_cast<const __nv_bfloat162*>(&word);
  const __nv_bfloat162 scaled = __hfma2(value, __float2bfloat162_rn(0.0f), __hmul2(value, inverse));
  const auto bits = *reinterpret_cast<const std::uint32_t*>(&scaled);
  return ptx::to_e4m3(Pair<__nv_bfloat16>::low(bits), Pair<__nv_bfloat16>::high(bits));
}

/// Writes the block's codes to a box of 64 rows by 128 codes, swizzled, and finds the scales of the
/// lane's rows.
__device__ __forceinline__ void write_codes(RowScales& scale, std::uint32_t box,
                                            const BlockWords& words) {
  std::uint32_t most = largest_of_rows(largest(words));
  if (__any_sync(~0u, not_finite(most) != 0)) most = largest_of_rows(largest_finite(words));
  scale[0] = fp8::scale_of(most << 16);
  scale[1] = fp8::scale_of(most & 0xffff0000u);
  const __nv_bfloat162 inverse[2] = {__float2bfloat162_rn(fp8::inverse_of(scale[0])),
                                     __float2bfloat162_rn(fp8::inverse_of(scale[1]))};
  const int lane = ptx::lane();
  const int swizzle = lane >> 2;
  const int row = ((threadIdx.x >> 5) & 3) * 16 + swizzle;
  const std::uint32_t first = box + row * 128 + (swizzle << 4) + (lane & 3) * 2;
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const std::uint32_t codes = codes_of(words[i], inverse[i & 1]);
    const std::uint32_t at = (first ^ (i >> 2) << 4) + (i >> 1 & 1) * 8 + (i & 1) * 8 * 128;
    ptx::store_half_word(at, static_cast<std::uint16_t>(codes));
  }
}

/// Stores the scales of this warp's rows for block `block` of the columns.
__device__ __forceinline__ void store_scales(const Fp8RowsOut& to, int block, const CtaTile& tile,
                                             Rows rows, const RowScales& scale) {
  const int lane = ptx::lane();
  if ((lane & 3) != 0) return;
  const int row = rows.offset + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
  float* at = to.scales + static_cast<std::int64_t>(block) * to.scale_rows + tile.row + row;
  if (row < tile.valid_rows) at[0] = scale[0];
  if (row + 8 < tile.valid_rows) at[8] = scale[1];
}

/// Quantises a block into box `box` and stores its scales.
__device__ __forceinline__ void quantize_block(const Fp8RowsOut& to, int block,
                                               const Fp8Staging& staging, int box,
                                               const BlockWords& words, const CtaTile& tile,
                                               Rows rows) {
  RowScales scale;
  write_codes(scale, staging.box(box), words);
  store_scales(to, block, tile, rows, scale);
}

/// Writes the block's words to the boxes `box` and `box` + 1.
__device__ __forceinline__ void write_words(const Fp8Staging& staging, int box,
                                            const BlockWords& words) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    staging.write(box + half, words.half[half]);
  }
}

/// Issues the store of a box of codes: block `block` of the columns.
__device__ __forceinline__ void issue_codes(const Fp8RowsOut& to, const Fp8Staging& staging,
                                            int box, int block, const CtaTile& tile, Rows rows) {
  store_ragged(to.codes, staging.box(box), block * 64, 0, tile, rows.offset);
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
