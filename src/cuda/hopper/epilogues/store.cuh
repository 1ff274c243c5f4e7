// Epilogue of Y = r(acc + b2), dX~ = r(acc) and the grouped GEMM: adds a bias, multiplies each row
// by a scale (both optional), rounds and stores. Cooperative tiles are stored under the products of
// the next tile, ping-pong tiles under the products of the other warpgroup.
#pragma once

#include "cuda/hopper/epilogues/deferred_tile.cuh"
#include "cuda/hopper/epilogues/ragged.cuh"
#include "cuda/hopper/epilogues/rounding.cuh"

namespace sonicmoe::cuda {

/// kWeights: each row is multiplied by its routing weight (grouped rows) or by a number (low-rank
/// factors) before the one rounding. In cooperative tiles only.
enum class RowScale { kNone, kWeights };

template <class Element, RowScale kScale = RowScale::kNone, int kBlocks = 4>
struct StoreRows {
  using Params = StoreRowsParams;
  using State = DeferredTile<kBlocks>;
  static constexpr int kPieces = kBlocks;  // one box each

  /// Spreads the pieces over half of the next tile. All clusters end their tiles at about the same
  /// time. If all of a tile's stores were issued at once, they would delay the next tiles' loads
  /// more.
  static __device__ __forceinline__ int k_tiles_per_piece(int k_tiles) { return k_tiles / 8 + 1; }

  template <TileShape kShape>
  static __device__ __forceinline__ void take(const Params& p, State& state,
                                              const float (&acc)[kShape.row_blocks()][kShape.n / 2],
                                              const CtaTile& tile, const Staging<kShape>& staging,
                                              Rows rows) {
    state.save_origin(tile, staging, rows);
    if (kScale == RowScale::kNone && p.bias.data == nullptr) {
      round_tile<BiasUse::kNone>(state, acc[0], staging);
      return;
    }
    staging.sync();
    if (p.bias.data != nullptr) {
      stage_bias(staging, p.bias, staging.saved_expert(), tile.column, p.width, {0, 1, kShape.n});
    }
    if constexpr (kScale == RowScale::kWeights) {
      for (int i = threadIdx.x & 127; i < kShape.warpgroup_rows(); i += kWarpgroup) {
        const int row = rows.offset + i;
        const std::int64_t at = (tile.row + row) * p.scale_stride;
        const bool reads = p.row_scale != nullptr && row < tile.valid_rows;
        staging.set_scale(i, p.factor * (reads ? __ldg(p.row_scale + at) : 1.0f));
      }
    }
    staging.sync();
    round_tile<BiasUse::kStaged>(state, acc[0], staging);
  }

  template <int kPiece, TileShape kShape>
  static __device__ __forceinline__ void piece(const Params& p, State& state,
                                               const Staging<kShape>& staging) {
    constexpr int kBox = kPiece % kShape.boxes;
    staging.begin();
    staging.write(kBox, state.block[kPiece]);
    state.store(staging, [&](const TileOrigin& origin) {
      store_ragged(p.out, staging.box(kBox), origin.column + kPiece * 64, 0, origin);
    });
  }

  template <TileShape kShape>
    requires(kShape.ping_pong() && kScale == RowScale::kNone)
  static __device__ __forceinline__ void run(const Params& p, State&,
                                             float (&acc)[kShape.row_blocks()][kShape.n / 2],
                                             const CtaTile& tile, const Staging<kShape>& staging,
                                             Rows rows) {
    constexpr int kAcross = kShape.n / 64;
    static_assert(kAcross == kShape.boxes);
    if (p.bias.data != nullptr) {
      stage_bias(staging, p.bias, tile.expert, tile.column, p.width, {0, 1, kShape.n});
      staging.sync();
    }
#pragma unroll
    for (int block = 0; block < kShape.row_blocks(); block++) {
      if (block >= rows.blocks) break;
      staging.begin();
#pragma unroll
      for (int i = 0; i < kAcross; i++) {
        Fragment rounded;
        round_block<Element, BiasUse::kStaged>(rounded, &acc[block][i * 32], staging, i * 64);
        staging.write(i, rounded);
      }
      staging.publish();
      if (staging.elected()) {
#pragma unroll
        for (int i = 0; i < kAcross; i++) {
          store_ragged(p.out, staging.box(i), tile.column + i * 64, 0, tile,
                       rows.offset + block * 64);
        }
        staging.commit();
      }
    }
  }

 private:
  template <BiasUse kBias, TileShape kShape>
  static __device__ __forceinline__ void round_tile(State& state, const float (&acc)[kShape.n / 2],
                                                    const Staging<kShape>& staging) {
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      if constexpr (kScale == RowScale::kWeights) {
        round_scaled_block<Element>(state.block[i], acc + i * 32, staging, i * 64, 0);
      } else {
        round_block<Element, kBias>(state.block[i], acc + i * 32, staging, i * 64);
      }
    }
  }
};

}  // namespace sonicmoe::cuda
