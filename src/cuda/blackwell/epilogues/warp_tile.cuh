// An epilogue warp's part of a tile: 32 rows, of which each lane has one.
//
//   | rows of the tile | quarter q of tensor memory of a CTA has                               |
//   | 256              | rows 32 q and on of the CTA's 128, all columns                        |
//   | 128              | rows 32 (q % 2) and on of the CTA's 64, the columns of half q / 2     |
//
// A half of D's columns is the columns for which one CTA loads B.
#pragma once

#include "cuda/blackwell/engine/barriers.cuh"
#include "cuda/blackwell/engine/tiles.cuh"
#include "cuda/blackwell/ptx/tensor_memory.cuh"
#include "cuda/math/bias.h"
#include "cuda/math/element.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/store16.cuh"

namespace sonicmoe::cuda::blackwell {

struct WarpTile {
  int expert;
  int row;         ///< the warp's first row in expert order
  int rows;        ///< rows of the expert from there on; 0 or negative: none
  int column;      ///< the tile's first column of a matrix
  int first_half;  ///< of the columns that the warp has
  int halves;      ///< 1 or 2
  int half_columns;
  int lane;
  bool is_zero;           ///< D is 0, and tensor memory does not have it
  std::uint32_t tensor;   ///< address of the first column of first_half
  std::uint32_t staging;  ///< address of kStagingBuffers buffers

  __device__ __forceinline__ WarpTile(const Tile& tile, const Cta& cta, int warp,
                                      std::uint32_t accumulator)
      : expert(tile.expert),
        column(tile.column),
        first_half(tile.is_tail() ? warp / 2 : 0),
        halves(tile.is_tail() ? 1 : 2),
        half_columns(tile.half_columns),
        lane(static_cast<int>(threadIdx.x) % 32),
        is_zero(tile.k_tiles == 0),
        tensor(accumulator + (static_cast<std::uint32_t>(warp) << 21)),
        staging(cta.staging(warp)) {
    const int offset = cta.rank * tile.cta_rows + 32 * (tile.is_tail() ? warp % 2 : warp);
    row = tile.row + offset;
    rows = tile.rows - offset;
  }

  /// Loads columns of the lane's row, from `from` of the warp's columns on. All lanes call it.
  template <int kColumns>
  __device__ __forceinline__ void load(float (&values)[kColumns], int from) const {
    __syncwarp();
    ptx::load_tensor_memory(values, tensor + from);
  }
  /// The same for words, of 16 columns.
  __device__ __forceinline__ void load_words(std::uint32_t (&words)[16], int from) const {
    __syncwarp();
    ptx::load_tensor_memory(words, tensor + from);
  }
  /// Stores words over D: of 16 columns, or four of each argument over 8 columns.
  __device__ __forceinline__ void store_words(const std::uint32_t (&words)[16], int from) const {
    __syncwarp();
    ptx::store_tensor_memory(words, tensor + from);
  }
  __device__ __forceinline__ void store_words(const std::uint32_t (&first)[4],
                                              const std::uint32_t (&second)[4], int from) const {
    __syncwarp();
    ptx::store_tensor_memory(first, second, tensor + from);
  }
  /// The address of chunk `chunk`, of 16 bytes, of row `row` in a staging buffer. Chunks are
  /// exchanged within a row, which avoids bank conflicts if eight lanes access the same chunk of
  /// neighbouring rows.
  __device__ __forceinline__ std::uint32_t staged(int buffer, int row, int chunk) const {
    constexpr int kRowBytes = kPiece * kElementBytes;
    return staging + buffer * kStagingBytes + row * kRowBytes + (chunk ^ (row / 2 % 4)) * 16;
  }
};

/// Rows of 16-bit elements: the first byte of the warp's first row, the bytes between rows, and the
/// columns from there to the end of a row.
struct Target {
  std::uint8_t* data;
  std::int64_t row_bytes;
  int columns;
};

/// Calls call(address in memory, address in the staging buffer) for each chunk of kColumns columns
/// of the warp's rows that exists. Neighbouring lanes have neighbouring bytes.
template <int kColumns, class Call>
__device__ __forceinline__ void for_each_chunk(const WarpTile& tile, const Target& at, int buffer,
                                               const Call& call) {
  constexpr int kChunks = kColumns / 8;
#pragma unroll
  for (int i = 0; i < kChunks; i++) {
    const int row = (i * 32 + tile.lane) / kChunks;
    const int chunk = tile.lane % kChunks;
    if (row < tile.rows && chunk * 8 < at.columns) {
      call(reinterpret_cast<uint4*>(at.data + row * at.row_bytes + chunk * 16),
           tile.staged(buffer, row, chunk));
    }
  }
}

/// Stores the kColumns columns of the warp's rows that are in a staging buffer.
template <int kColumns>
__device__ __forceinline__ void store_staged(const WarpTile& tile, const Target& to, int buffer) {
  for_each_chunk<kColumns>(tile, to, buffer, [](uint4* memory, std::uint32_t staged) {
    *memory = ptx::load_shared16(staged);
  });
}

/// Writes kColumns columns of the lane's row to staging buffer 0. All lanes call it.
template <int kColumns>
__device__ __forceinline__ void stage_row(const WarpTile& tile, const std::uint32_t* words) {
  __syncwarp();
#pragma unroll
  for (int c = 0; c < kColumns / 8; c++) {
    ptx::store_shared16(tile.staged(0, tile.lane, c),
                        {words[4 * c], words[4 * c + 1], words[4 * c + 2], words[4 * c + 3]});
  }
  __syncwarp();
}

/// Stores kColumns columns of the warp's rows, of which `words` are the lane's.
template <int kColumns>
__device__ __forceinline__ void store_rows(const WarpTile& tile, const Target& to,
                                           const std::uint32_t* words) {
  stage_row<kColumns>(tile, words);
  store_staged<kColumns>(tile, to, 0);
}

/// Adds the biases of kPiece / kStep columns to every kStep-th value. Each lane loads the bias of
/// one column; biases past the last of `columns` are 0. All lanes call it.
template <class Element, int kStep = 1>
__device__ __forceinline__ void add_bias(float* values, const Bias& bias, const WarpTile& tile,
                                         int column, int columns) {
  const int own = column + tile.lane;
  const auto* data = static_cast<const Element*>(bias.data) + tile.expert * bias.expert_stride;
  const float loaded =
      own < columns ? static_cast<float>(__ldg(data + own * bias.column_stride)) : 0.0f;
#pragma unroll
  for (int i = 0; i < kPiece / kStep; i++) values[i * kStep] += __shfl_sync(~0u, loaded, i);
}

/// Rounds kPiece values to words.
template <class Element>
__device__ __forceinline__ void round_piece(std::uint32_t (&words)[kPiece / 2],
                                            const float (&values)[kPiece]) {
#pragma unroll
  for (int i = 0; i < kPiece / 2; i++) {
    words[i] = Pair<Element>::pack(values[2 * i], values[2 * i + 1]);
  }
}

}  // namespace sonicmoe::cuda::blackwell
