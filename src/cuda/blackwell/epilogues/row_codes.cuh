// Quantises blocks of 128 columns of the warp's rows. A lane has a whole row of a block, so it
// knows the block's scale once it has seen the row. Until then tensor memory keeps the row, in bf16
// words that the epilogue writes over D.
#pragma once

#include "core/fp8_layout.h"
#include "cuda/blackwell/codes_params.h"
#include "cuda/blackwell/epilogues/warp_tile.cuh"
#include "cuda/fp8/codes.cuh"

namespace sonicmoe::cuda::blackwell {

inline constexpr int kBlock = static_cast<int>(fp8::kBlock);

/// A block of 128 columns in rows of one or two parts.
struct BlockOf {
  int part;
  int block;  ///< of the part
};

/// Stores the scale and the first `columns` codes of a block. `largest` is the largest magnitude in
/// the lane's row; read(words, piece) gets the row's columns kPiece * piece and on. All lanes call
/// it.
template <class Read>
__device__ __forceinline__ void store_codes(const WarpTile& tile, const RowCodes& to, BlockOf at,
                                            std::uint32_t largest, int columns, const Read& read) {
  const float scale = fp8::scale_of(largest);
  const float inverse = fp8::inverse_of(scale);
  const std::int64_t block = at.part * to.part_blocks + at.block;
  if (tile.lane < tile.rows) to.scales[block * to.block_stride + tile.row + tile.lane] = scale;
  std::uint8_t* const codes =
      to.codes + tile.row * to.row_bytes + at.part * to.part_bytes + at.block * kBlock;
#pragma unroll 1
  for (int c = 0; c < min(columns, kBlock); c += kPiece) {
    std::uint32_t words[kPiece / 2];
    read(words, c / kPiece);
    std::uint32_t packed[kPiece / 4];
#pragma unroll
    for (int i = 0; i < kPiece / 4; i++) {
      packed[i] = code_pair(words[2 * i], inverse) | code_pair(words[2 * i + 1], inverse) << 16;
    }
    // Two codes count as one element.
    store_rows<kPiece / 2>(tile, {codes + c, to.row_bytes, (columns - c) / 2}, packed);
  }
}

template <int kWords>
__device__ __forceinline__ std::uint32_t larger_of(std::uint32_t most,
                                                   const std::uint32_t (&words)[kWords]) {
#pragma unroll
  for (const std::uint32_t word : words) most = larger_magnitude(most, word);
  return most;
}

}  // namespace sonicmoe::cuda::blackwell
