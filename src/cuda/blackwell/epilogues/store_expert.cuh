// Epilogue of weight gradients: stores a matrix for each expert in 16 bits or in fp32, or adds it
// to fp32 values in memory. It adds nothing for an expert without rows: -0 + 0 would change a value
// to +0.
#pragma once

#include "cuda/blackwell/epilogues/warp_tile.cuh"
#include "cuda/portable/epilogues/grad_target.cuh"
#include "cuda/portable/params.h"

namespace sonicmoe::cuda::blackwell {

template <class Element>
struct StoreExpert {
  using Params = portable::StoreExpertParams;
  static constexpr bool kMayBeginAtOnce = true;

  static __device__ __forceinline__ void run(const Params& p, const WarpTile& tile) {
    if (tile.is_zero && p.store == GradStore::kAccumulate) return;
    const int first = tile.column + tile.first_half * tile.half_columns;
#pragma unroll 1
    for (int c = 0; c < tile.halves * tile.half_columns; c += kPiece) {
      const int column = first + c;
      if (column >= p.columns) break;
      float values[kPiece] = {};
      if (!tile.is_zero) tile.load(values, c);
      if (p.store == GradStore::kElement) {
        store_words(p, tile, column, values);
      } else {
        store_floats(p, tile, column, values);
      }
    }
  }

 private:
  using Target = portable::GradTarget;

  static __device__ __forceinline__ void store_words(const Params& p, const WarpTile& tile,
                                                     int column, const float (&values)[kPiece]) {
    constexpr int kChunks = kPiece / 8;  // of a row
    std::uint32_t words[kPiece / 2];
    round_piece<Element>(words, values);
    stage_row<kPiece>(tile, words);
    const int chunk = tile.lane % kChunks;
    if (column + chunk * 8 >= p.columns) return;
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
      const int row = (i * 32 + tile.lane) / kChunks;
      if (row >= tile.rows) break;
      const Target to(p, tile.expert, tile.row + row, column + chunk * 8);
      if (to.data == nullptr) continue;
      *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(to.data) + to.offset) =
          ptx::load_shared16(tile.staged(0, row, chunk));
    }
  }

  // fp32 values fill staging buffers 0 and 1: 32 rows of 8 chunks of 16 bytes. Neighbouring lanes
  // store neighbouring chunks.
  static constexpr int kFloatChunks = kPiece / 4;
  static_assert(32 * kPiece * 4 <= kStagingBuffers * kStagingBytes);

  static __device__ __forceinline__ std::uint32_t staged_floats(const WarpTile& tile, int row,
                                                                int chunk) {
    return tile.staging + row * kPiece * 4 + (chunk ^ row % kFloatChunks) * 16;
  }

  static __device__ __forceinline__ void store_floats(const Params& p, const WarpTile& tile,
                                                      int column, const float (&values)[kPiece]) {
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kFloatChunks; c++) {
      ptx::store_shared16(staged_floats(tile, tile.lane, c),
                          {__float_as_uint(values[4 * c]), __float_as_uint(values[4 * c + 1]),
                           __float_as_uint(values[4 * c + 2]), __float_as_uint(values[4 * c + 3])});
    }
    __syncwarp();
    const int chunk = tile.lane % kFloatChunks;
    const int own_column = column + chunk * 4;
    if (own_column >= p.columns) return;
    if (p.vectors != 0) {
      store_vectors(p, tile, own_column, chunk);
    } else {
      store_each(p, tile, own_column, chunk);
    }
  }

  static __device__ __forceinline__ float4 load_chunk(const WarpTile& tile, int row, int chunk) {
    const uint4 bits = ptx::load_shared16(staged_floats(tile, row, chunk));
    return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
            __uint_as_float(bits.w)};
  }

  /// The old values of kTogether rows are loaded at once, so that the loads overlap.
  static __device__ __forceinline__ void store_vectors(const Params& p, const WarpTile& tile,
                                                       int column, int chunk) {
    constexpr int kTogether = 4;
    constexpr int kRowStep = 32 / kFloatChunks;
#pragma unroll 1
    for (int first = tile.lane / kFloatChunks; first < 32; first += kTogether * kRowStep) {
      float4* at[kTogether];
      float4 old[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kTogether; i++) {
        const int row = first + i * kRowStep;
        const Target to(p, tile.expert, tile.row + row, column);
        const bool exists = row < tile.rows && to.data != nullptr;
        at[i] =
            exists ? reinterpret_cast<float4*>(static_cast<float*>(to.data) + to.offset) : nullptr;
        if (exists && p.store == GradStore::kAccumulate) old[i] = *at[i];
      }
#pragma unroll
      for (int i = 0; i < kTogether; i++) {
        if (at[i] == nullptr) continue;
        float4 v = load_chunk(tile, first + i * kRowStep, chunk);
        if (p.store == GradStore::kAccumulate) {
          v = {old[i].x + v.x, old[i].y + v.y, old[i].z + v.z, old[i].w + v.w};
        }
        *at[i] = v;
      }
    }
  }

  static __device__ __forceinline__ void store_each(const Params& p, const WarpTile& tile,
                                                    int column, int chunk) {
#pragma unroll 1
    for (int row = tile.lane / kFloatChunks; row < min(32, tile.rows); row += 32 / kFloatChunks) {
      const float4 v = load_chunk(tile, row, chunk);
      const float each[] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const Target to(p, tile.expert, tile.row + row, column + i);
        if (to.data == nullptr) continue;
        float* at = static_cast<float*>(to.data) + to.offset;
        *at = p.store == GradStore::kAccumulate ? *at + each[i] : each[i];
      }
    }
  }
};

}  // namespace sonicmoe::cuda::blackwell
