// Epilogue that stores rows: out = r(scale * (D + bias)).
#pragma once

#include "cuda/portable/epilogues/bias.cuh"
#include "cuda/portable/epilogues/staging.cuh"
#include "cuda/portable/params.h"

namespace sonicmoe::cuda::portable {

template <class Element>
struct Store {
  using Params = StoreParams;
  static constexpr Columns kColumns = Columns::kNeighbours;
  static constexpr ColumnOrder kColumnOrder = ColumnOrder::kAscending;

  static __device__ __forceinline__ void run(const Params& p, const Accumulators& acc,
                                             const TileSlot& tile, const Warp& warp,
                                             std::uint32_t staging) {
    const int rows = tile.rows - warp.row * kWarpRows;
    const int first = tile.column + warp.column * kWarpColumns;
    std::uint8_t* out = p.out.data +
                        (std::int64_t{tile.row} + warp.row * kWarpRows) * p.out.row_bytes +
                        first * kElementBytes;
#pragma unroll 1
    for (int part = 0; part < 4; part++) {
      with_part(acc, part,
                [&](const float(&values)[8][4]) { write(p, values, tile, warp, part, staging); });
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 16 * kChunks / 32; i++) {
        const int row = i * 4 + (warp.lane >> 3);
        const int chunk = warp.lane & 7;
        const uint4 words = ptx::load_shared16(staging + row * kWordsRowBytes + chunk * 16);
        if (part * 16 + row < rows && first + chunk * 8 < p.columns) {
          *reinterpret_cast<uint4*>(out + (part * 16 + row) * p.out.row_bytes + chunk * 16) = words;
        }
      }
      __syncwarp();
    }
  }

 private:
  static __device__ __forceinline__ void write(const Params& p, const float (&values)[8][4],
                                               const TileSlot& tile, const Warp& warp, int part,
                                               std::uint32_t staging) {
    const std::uint32_t at = word_address(staging, warp);
    if (p.bias.data == nullptr && p.row_scale == nullptr && p.factor == 1.0f) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        std::uint32_t words[2];
        round_words<Element>(words, values[j]);
        write_words(at, j, words);
      }
      return;
    }
    const int row = warp.row * kWarpRows + part * 16 + (warp.lane >> 2);
    const float scale[2] = {scale_of(p, tile, row), scale_of(p, tile, row + 8)};
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int column = tile.column + warp.column * kWarpColumns + j * 8 + (warp.lane & 3) * 2;
      const std::uint32_t bias =
          p.bias.data == nullptr ? 0 : bias_word(p.bias, tile.expert, column, p.columns);
      std::uint32_t words[2];
      round_words<Element>(words, values[j], bias, scale[0], scale[1]);
      write_words(at, j, words);
    }
  }

  static __device__ __forceinline__ float scale_of(const Params& p, const TileSlot& tile, int row) {
    if (p.row_scale == nullptr || row >= tile.rows) return p.factor;
    return p.factor * p.row_scale[(std::int64_t{tile.row} + row) * p.scale_stride];
  }
};

}  // namespace sonicmoe::cuda::portable
