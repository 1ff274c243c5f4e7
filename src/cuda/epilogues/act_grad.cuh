// Epilogue of dH. The accumulator is dA' = dO W2, never rounded. From H (loaded under the products)
// and the row's score s: dH = r(act'(H) s dA'), A' = r(s act(H)), dS = sum of dA' r(act(H)).
//
// Boxes: two sets of (gate, up, A'); block b of 64 columns uses set b % 2, dH overwrites H in
// place. The loads of the first two blocks start before the products of the tile.
#pragma once

#include "cuda/epilogues/activation.cuh"
#include "cuda/epilogues/store.cuh"

namespace sonicmoe::cuda {

struct ActGradParams {
  CUtensorMap h_in;         ///< (column, part, row), box 64 x 1 x 64
  RaggedMap dh;             ///< (column, part, row, base)
  RaggedMap a;              ///< A'
  const float* row_weight;  ///< (C) s; null: 1
  float* score_parts;       ///< (C, score_tiles): dS of a row and tile of columns
  std::int32_t score_tiles;
  ActivationScalars scalars;
};

template <class Element, ActivationKind kKind>
struct ActGrad {
  using Params = ActGradParams;
  using Act = ActivationOf<kKind>;
  using Two = Pair<Element>;
  static constexpr bool kGated = is_gated(kKind);
  static constexpr int kParts = kGated ? 2 : 1;
  static constexpr int kSet = 3;  // boxes of a set

  struct State {
    std::uint32_t parity;  ///< of the next load of either set
  };

  template <TileShape kShape>
  static __device__ __forceinline__ void begin(const Params& p, State&, const Work& work,
                                               const Staging<kShape>& staging, Rows rows) {
    if (staging.elected()) {
      ptx::tma_wait_read();
      load(p, work, staging, rows.offset, 0);
      load(p, work, staging, rows.offset, 1);
    }
    for (int i = threadIdx.x & 127; i < kShape.warpgroup_rows(); i += kWarpgroup) {
      const int row = rows.offset + i;
      const bool weighted = p.row_weight != nullptr && row < work.left;
      staging.set_scale(i, weighted ? __ldg(p.row_weight + work.row + row) : 1.0f);
    }
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void run(const Params& p, State& state,
                                             float (&acc)[kShape.halves()][kShape.n / 2],
                                             const Work& work, const Staging<kShape>& staging,
                                             Rows rows) {
    static_assert(kShape.n == 128 && kShape.boxes == 2 * kSet);
    staging.sync();  // the scales are set
#pragma unroll
    for (int half = 0; half < kShape.halves(); half++) {
      if (half >= rows.halves) break;
      float score[2] = {0.0f, 0.0f};
#pragma unroll
      for (int set = 0; set < 2; set++) {
        staging.loaded(set).wait(state.parity);
        block(p, &acc[half][set * 32], staging, half, set, score);
        staging.publish();
        if (staging.elected()) {
          store(p, work, staging, rows.offset, half * 2 + set);
          if (half + 1 < rows.halves) {
            ptx::tma_wait_read();
            load(p, work, staging, rows.offset, half * 2 + set + 2);
          }
        }
      }
      state.parity ^= 1;
      put_scores(p, work, rows.offset + half * 64, score);
    }
  }

 private:
  template <TileShape kShape>
  static __device__ __forceinline__ void load(const Params& p, const Work& work,
                                              const Staging<kShape>& staging, int offset, int b) {
    const int set = b % 2;
    const ptx::Mbarrier loaded = staging.loaded(set);
    loaded.arrive_expecting(kParts * kBoxBytes);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      ptx::tma_load(staging.box(set * kSet + part), &p.h_in, loaded,
                    {work.column + set * 64, part, work.row + offset + b / 2 * 64});
    }
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void store(const Params& p, const Work& work,
                                               const Staging<kShape>& staging, int offset, int b) {
    const int set = b % 2;
    const int column = work.column + set * 64;
    const int row = offset + b / 2 * 64;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      store_ragged(p.dh, staging.box(set * kSet + part), column, part, work, row);
    }
    store_ragged(p.a, staging.box(set * kSet + 2), column, 0, work, row);
    staging.commit();
  }

  /// One 64x64 block: H in boxes becomes dH, A' beside it. Eight columns at a time, because the
  /// accumulator leaves no room for whole blocks.
  template <TileShape kShape>
  static __device__ __forceinline__ void block(const Params& p, const float* acc,
                                               const Staging<kShape>& staging, int half, int set,
                                               float (&score)[2]) {
#pragma unroll
    for (int c = 0; c < 8; c++) {
      const float scale[2] = {staging.row_scale(half, 0), staging.row_scale(half, 1)};
      std::uint32_t h[2][2];
      std::uint32_t a[2];
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        ptx::load_matrices(h[part], staging.place(set * kSet + part, c));
      }
#pragma unroll
      for (int w = 0; w < 2; w++) {
        const float* pair = acc + 4 * c + 2 * w;
        a[w] = element_pair(p, h[0][w], h[1][w], pair, scale[w], score[w]);
      }
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        ptx::store_matrices(staging.place(set * kSet + part, c), h[part]);
      }
      ptx::store_matrices(staging.place(set * kSet + 2, c), a);
    }
  }

  /// Two neighbouring elements: H becomes dH; returns A'.
  static __device__ __forceinline__ std::uint32_t element_pair(const Params& p,
                                                               std::uint32_t& first,
                                                               std::uint32_t& second,
                                                               const float* grad, float s,
                                                               float& score) {
    const float low = grad[0];
    const float high = grad[1];
    float value[2];
    if constexpr (kGated) {
      const float gate[2] = {Two::low(first), Two::high(first)};
      const float up[2] = {Two::low(second), Two::high(second)};
      const float2 by_low = Act::gradient(gate[0], up[0], p.scalars);
      const float2 by_high = Act::gradient(gate[1], up[1], p.scalars);
      value[0] = Act::value(gate[0], up[0], p.scalars);
      value[1] = Act::value(gate[1], up[1], p.scalars);
      first = Two::pack(by_low.x * (s * low), by_high.x * (s * high));
      second = Two::pack(by_low.y * (s * low), by_high.y * (s * high));
    } else {
      const float x[2] = {Two::low(first), Two::high(first)};
      value[0] = Act::value(x[0]);
      value[1] = Act::value(x[1]);
      first = Two::pack(Act::gradient(x[0]) * (s * low), Act::gradient(x[1]) * (s * high));
    }
    const std::uint32_t rounded = Two::pack(value[0], value[1]);
    score = fmaf(low, Two::low(rounded), score);
    score = fmaf(high, Two::high(rounded), score);
    return Two::pack(s * value[0], s * value[1]);
  }

  /// Sums over the four lanes of a row, in a fixed order, and writes this tile's part.
  static __device__ __forceinline__ void put_scores(const Params& p, const Work& work, int offset,
                                                    const float (&score)[2]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int which = 0; which < 2; which++) {
      float sum = score[which];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = offset + ((threadIdx.x >> 5) & 3) * 16 + which * 8 + (lane >> 2);
      if ((lane & 3) == 0 && row < work.left) {
        const std::int64_t at = static_cast<std::int64_t>(work.row + row) * p.score_tiles;
        p.score_parts[at + work.column / 128] = sum;
      }
    }
  }
};

}  // namespace sonicmoe::cuda
