// Epilogue of the weight gradients: one matrix an expert, (M, N) with N contiguous, or transposed
// with M contiguous. 16-bit results go through TMA; fp32 results, written or accumulated, go
// straight from the registers. Experts without rows get zero, or are left alone.
#pragma once

#include "cuda/epilogues/element.cuh"

namespace sonicmoe::cuda {

enum class GradStore : std::int32_t { kElement = 0, kFloat = 1, kAccumulate = 2 };

/// fp32 matrices (expert, M, N); strides in elements.
struct FloatGrad {
  float* data;
  std::int64_t strides[3];
};

/// By output: gate and up, or one alone.
struct StoreExpertParams {
  CUtensorMap map[2];   ///< kElement: (contiguous, other, expert), box 64 x 64 x 1
  FloatGrad floats[2];  ///< kFloat, kAccumulate
  GradStore mode;
  std::int32_t alternate;  ///< fp32: even columns go to [0], odd ones to [1]
  std::int32_t rows;       ///< M
  std::int32_t columns;    ///< N
  /// First column that goes to [1], past all tiles where there is none. With kElement a multiple of
  /// 64: a store may end past its output, but not begin before it.
  std::int32_t border;
};

template <class Element, Major kOut>
struct StoreExpert {
  using Params = StoreExpertParams;
  /// The second half of a tile, rounded. Where it goes only the elected thread asks: it writes that
  /// down.
  struct State {
    Fragment block[2];
    bool held;
  };
  /// All clusters end their tiles at about the same time, and what they store at once keeps the
  /// next tiles' loads waiting. So half of it waits, the warpgroups' halves for different k tiles;
  /// with a whole tile held the products are slower. A short tile is stored at once: there is not
  /// much to overtake.
  static __device__ __forceinline__ int late_at(int k_tiles, int warpgroup) {
    return k_tiles <= 10 ? 0 : 4 + 5 * warpgroup;
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void run(const Params& p, State& state,
                                             float (&acc)[kShape.halves()][kShape.n / 2],
                                             const Work& work, const Staging<kShape>& staging,
                                             Rows rows) {
    static_assert(kShape.halves() == 1 && kShape.boxes == 2 && kShape.n == 256);
    const bool empty = work.depth == 0;
    if (p.mode != GradStore::kElement) {
      if (empty && p.mode == GradStore::kAccumulate) return;
      store_floats<kShape>(p, acc[0], work, rows.offset, empty);
      return;
    }
    Fragment first[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      round(first[i], &acc[0][i * 32], empty);
      round(state.block[i], &acc[0][(2 + i) * 32], empty);
    }
    const int m = work.m + rows.offset;
    store(p, first, staging, [&] { return Place{work.column, m, work.expert}; });
    if (staging.elected()) staging.note({work.column + 128, m, work.expert});
    state.held = true;
  }

  /// Stores the other half.
  template <TileShape kShape>
  static __device__ __forceinline__ void late(const Params& p, State& state,
                                              const Staging<kShape>& staging) {
    store(p, state.block, staging, [&] { return staging.noted(); });
    state.held = false;
  }

 private:
  static __device__ __forceinline__ void round(Fragment& block, const float* acc, bool empty) {
#pragma unroll
    for (int w = 0; w < 16; w++) {
      block[w] = empty ? 0u : Pair<Element>::pack(acc[2 * w], acc[2 * w + 1]);
    }
  }

  /// Two blocks of 64 columns from column where() on, `below` being their first row and `end` the
  /// expert. Only the elected thread asks.
  template <TileShape kShape, class Where>
  static __device__ __forceinline__ void store(const Params& p, const Fragment (&blocks)[2],
                                               const Staging<kShape>& staging, Where where) {
    staging.begin();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if constexpr (kOut == Major::kK) {
        staging.write(i, blocks[i]);
      } else {
        staging.write_transposed(i, blocks[i]);
      }
    }
    staging.publish();
    if (!staging.elected()) return;
    const Place place = where();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = place.column + i * 64;
      const int output = column < p.border ? 0 : 1;
      const int n = column - (output == 0 ? 0 : p.border);
      const int m = place.below;
      ptx::tma_store(
          &p.map[output], staging.box(i),
          kOut == Major::kK ? ptx::Coord3{n, m, place.end} : ptx::Coord3{m, n, place.end});
    }
    staging.commit();
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void store_floats(const Params& p, const float* acc,
                                                      const Work& work, int offset, bool empty) {
    const int lane = threadIdx.x & 31;
    const int m0 = work.m + offset + ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
    const int n0 = work.column + (lane & 3) * 2;
    const bool alternate = p.alternate != 0;
#pragma unroll 1
    for (int output = 0; output < 2; output++) {
      const FloatGrad& out = p.floats[output];
      if (out.data == nullptr) continue;
      const int first = alternate || output == 0 ? 0 : p.border;
      const int width = min(p.border, p.columns - first);
#pragma unroll
      for (int i = 0; i < kShape.n / 2; i++) {
        const int m = m0 + (i >> 1 & 1) * 8;
        const int n = n0 + i / 4 * 8 + (i & 1) - first;
        if (m >= p.rows || n < 0 || n >= width || (alternate && i % 2 != output)) continue;
        float* at = out.data + work.expert * out.strides[0] + m * out.strides[1] +
                    (alternate ? n / 2 : n) * out.strides[2];
        const float value = empty ? 0.0f : acc[i];
        *at = p.mode == GradStore::kAccumulate ? *at + value : value;
      }
    }
  }
};

}  // namespace sonicmoe::cuda
