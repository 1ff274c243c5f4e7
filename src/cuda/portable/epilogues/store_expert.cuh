// Epilogue of weight gradients: stores a matrix for each expert in 16 bits or in fp32, or adds it
// to fp32 values in memory. It adds nothing for an expert without rows: -0 + 0 would change a value
// to +0.
#pragma once

#include "cuda/portable/epilogues/grad_target.cuh"
#include "cuda/portable/epilogues/staging.cuh"
#include "cuda/portable/params.h"

namespace sonicmoe::cuda::portable {

template <class Element>
struct StoreExpert {
  using Params = StoreExpertParams;
  static constexpr Columns kColumns = Columns::kNeighbours;
  static constexpr ColumnOrder kColumnOrder = ColumnOrder::kAscending;

  static __device__ __forceinline__ void run(const Params& p, const Accumulators& acc,
                                             const TileSlot& tile, const Warp& warp,
                                             std::uint32_t staging) {
    if (p.store == GradStore::kElement) {
      store_words(p, acc, tile, warp, staging);
    } else if (p.store == GradStore::kFloat || tile.summed > 0) {
      store_floats(p, acc, tile, warp, staging);
    }
  }

 private:
  static __device__ __forceinline__ void store_words(const Params& p, const Accumulators& acc,
                                                     const TileSlot& tile, const Warp& warp,
                                                     std::uint32_t staging) {
    const int column = tile.column + warp.column * kWarpColumns + (warp.lane & 7) * 8;
#pragma unroll 1
    for (int part = 0; part < 4; part++) {
      with_part(acc, part, [&](const float(&values)[8][4]) {
        const std::uint32_t at = word_address(staging, warp);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          std::uint32_t words[2];
          round_words<Element>(words, values[j]);
          write_words(at, j, words);
        }
      });
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 16 * kChunks / 32; i++) {
        const int slice_row = i * 4 + (warp.lane >> 3);
        const int row = warp.row * kWarpRows + part * 16 + slice_row;
        const uint4 words =
            ptx::load_shared16(staging + slice_row * kWordsRowBytes + (warp.lane & 7) * 16);
        if (row < tile.rows && column < p.columns) {
          const GradTarget to(p, tile.expert, tile.row + row, column);
          if (to.data == nullptr) continue;
          *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(to.data) + to.offset) = words;
        }
      }
      __syncwarp();
    }
  }

  static __device__ __forceinline__ void store_floats(const Params& p, const Accumulators& acc,
                                                      const TileSlot& tile, const Warp& warp,
                                                      std::uint32_t staging) {
    const int column = tile.column + warp.column * kWarpColumns + (warp.lane & 7) * 8;
#pragma unroll 1
    for (int slice = 0; slice < 8; slice++) {
      write_slice(staging, warp, acc, slice);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int slice_row = i * 4 + (warp.lane >> 3);
        const int row = warp.row * kWarpRows + slice * 8 + slice_row;
        if (row >= tile.rows || column >= p.columns) continue;
        float values[8];
        read_floats(values, staging, slice_row, warp.lane & 7);
        if (p.vectors != 0) {
          store_vectors(p, tile, row, column, values);
        } else {
          store_each(p, tile, row, column, values);
        }
      }
      __syncwarp();
    }
  }

  static __device__ __forceinline__ void store_vectors(const Params& p, const TileSlot& tile,
                                                       int row, int column,
                                                       const float (&values)[8]) {
    const GradTarget to(p, tile.expert, tile.row + row, column);
    if (to.data == nullptr) return;
    auto* at = reinterpret_cast<float4*>(static_cast<float*>(to.data) + to.offset);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float4 v{values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]};
      if (p.store == GradStore::kAccumulate) {
        const float4 old = at[i];
        v = {old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w};
      }
      at[i] = v;
    }
  }

  static __device__ __forceinline__ void store_each(const Params& p, const TileSlot& tile, int row,
                                                    int column, const float (&values)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const GradTarget to(p, tile.expert, tile.row + row, column + i);
      if (to.data == nullptr) continue;
      float* at = static_cast<float*>(to.data) + to.offset;
      *at = p.store == GradStore::kAccumulate ? *at + values[i] : values[i];
    }
  }
};

}  // namespace sonicmoe::cuda::portable
