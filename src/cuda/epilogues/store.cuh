// Epilogue: (+ bias), round, store. Y = r(acc + b2), dX~ = r(acc).
#pragma once

#include "cuda/epilogues/element.cuh"
#include "cuda/epilogues/ragged.cuh"

namespace sonicmoe::cuda {

struct StoreRowsParams {
  RaggedMap out;
  Bias bias;
  const float* row_scale;  ///< of a grouped row, by scale_stride; RowScale::kWeights only
  std::int64_t scale_stride;
  std::int32_t width;  ///< output columns
};

/// Whether rows are scaled before their one rounding: grouped rows with weights. Its two registers
/// are two more than the widest ping-pong tile has.
enum class RowScale { kNone, kWeights };

template <class Element, RowScale kScale = RowScale::kNone>
struct StoreRows : LoadsNothing {
  using Params = StoreRowsParams;

  template <TileShape kShape>
  static __device__ __forceinline__ void run(const Params& p, State&,
                                             float (&acc)[kShape.halves()][kShape.n / 2],
                                             const Work& work, const Staging<kShape>& staging,
                                             Rows rows) {
    constexpr int kAcross = kShape.n / 64;
    constexpr int kBlocks = kShape.halves() * kAcross;
    static_assert(kBlocks % kShape.boxes == 0);
    if (p.bias.data != nullptr) {
      stage_bias(staging, p.bias, work.expert, work.column, p.width, {0, 1, kShape.n});
    }
    if constexpr (kScale == RowScale::kWeights) {
      for (int i = threadIdx.x & 127; i < kShape.warpgroup_rows(); i += kWarpgroup) {
        const int row = rows.offset + i;
        const std::int64_t at = (work.row + row) * p.scale_stride;
        staging.set_scale(i, row < work.left ? __ldg(p.row_scale + at) : 0.0f);
      }
    }
    if (p.bias.data != nullptr || kScale == RowScale::kWeights) staging.sync();
#pragma unroll
    for (int first = 0; first < kBlocks; first += kShape.boxes) {
      if (first / kAcross >= rows.halves) break;
      staging.begin();
#pragma unroll
      for (int i = first; i < first + kShape.boxes; i++) {
        Fragment rounded;
        const float* block = &acc[i / kAcross][i % kAcross * 32];
        if constexpr (kScale == RowScale::kWeights) {
          round_scaled_block<Element>(rounded, block, staging, i % kAcross * 64, i / kAcross);
        } else {
          round_block<Element, BiasUse::kStaged>(rounded, block, staging, i % kAcross * 64);
        }
        staging.write(i - first, rounded);
      }
      staging.publish();
      if (staging.elected()) {
#pragma unroll
        for (int i = first; i < first + kShape.boxes; i++) {
          store_ragged(p.out, staging.box(i - first), work.column + i % kAcross * 64, 0, work,
                       rows.offset + i / kAcross * 64);
        }
        staging.commit();
      }
    }
  }
};

}  // namespace sonicmoe::cuda
