// Epilogue of dH. The accumulator is dA' = dO W2, never rounded. From H (loaded under the products)
// and the row's score s: dH = r(act'(H) s dA'), A' = r(s act(H)), dS = sum of dA' r(act(H)).
//
// Blocks of 64x64 alternate between two sets of boxes; dH overwrites H in place. The loads of the
// first two blocks start before the products of the tile, the next one's while a block is computed.
#pragma once

#include "cuda/epilogues/activation.cuh"
#include "cuda/epilogues/store.cuh"

namespace sonicmoe::cuda {

/// How gate and up lie in H and dH: columns [gate | up], or alternating (the paired form).
enum class HLayout { kSplit, kPaired };

struct ActGradParams {
  CUtensorMap h_in;  ///< (column, part, row), box 64 x 1 x 64; kPaired: one part of 2n columns
  RaggedMap dh;      ///< (column, part, row, base), the same
  RaggedMap a;       ///< A'
  const float* row_weight;  ///< (C) s; null: 1
  float* score_parts;       ///< (C, score_tiles): dS of a row and tile of columns
  std::int32_t score_tiles;
  ActivationScalars scalars;
};

template <class Element, ActivationKind kKind, HLayout kLayout>
struct ActGrad {
  using Params = ActGradParams;
  using Act = ActivationOf<kKind>;
  using Two = Pair<Element>;
  static constexpr bool kGated = is_gated(kKind);
  static constexpr bool kPaired = kLayout == HLayout::kPaired;
  static constexpr int kParts = kGated ? 2 : 1;
  static_assert(kGated || !kPaired);

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
    constexpr int kAcross = kShape.n / 64;
    static_assert(kShape.n % 128 == 0, "the sets take turns");
    staging.sync();  // the scales are set
#pragma unroll
    for (int half = 0; half < kShape.halves(); half++) {
      if (half >= rows.halves) break;
      float score[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < kAcross; j++) {
        const int b = half * kAcross + j;
        staging.loaded(b % 2).wait(state.parity);
        const auto ahead = [&] {
          if (b == 0) return;
          if (staging.elected()) {
            ptx::tma_wait_read();  // of the block before
            if (b + 1 < rows.halves * kAcross) load(p, work, staging, rows.offset, b + 1);
          }
          if (!kOwnBox<kShape>) staging.sync();
        };
        block(p, &acc[half][j * 32], staging, {half, b % 2}, score, ahead);
        staging.publish();
        if (staging.elected()) store(p, work, staging, rows.offset, b);
        if (b % 2 == 1) state.parity ^= 1;
      }
      put_scores<kShape>(p, work, rows.offset + half * 64, score);
    }
  }

 private:
  /// Sixteen columns of a 64x64 block, words as in Fragment.
  using Words = std::uint32_t[4];

  /// Whether every set has a box for A', or both share the last.
  template <TileShape kShape>
  static constexpr bool kOwnBox = kShape.boxes == 6;
  template <TileShape kShape>
  static constexpr int h_box(int set) {
    static_assert(kShape.boxes == 5 || kShape.boxes == 6);
    return set * (kOwnBox<kShape> ? 3 : 2);
  }
  template <TileShape kShape>
  static constexpr int a_box(int set) {
    return kOwnBox<kShape> ? set * 3 + 2 : 4;
  }
  /// First column and part of box `part` of a block whose first column of A is `column`.
  static __device__ __forceinline__ int h_column(int column, int part) {
    return kPaired ? 2 * column + 64 * part : column;
  }
  static constexpr int h_part(int part) { return kPaired ? 0 : part; }

  template <TileShape kShape>
  static __device__ __forceinline__ void load(const Params& p, const Work& work,
                                              const Staging<kShape>& staging, int offset, int b) {
    constexpr int kAcross = kShape.n / 64;
    const int column = work.column + b % kAcross * 64;
    const ptx::Mbarrier loaded = staging.loaded(b % 2);
    loaded.arrive_expecting(kParts * kBoxBytes);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      ptx::tma_load(staging.box(h_box<kShape>(b % 2) + part), &p.h_in, loaded,
                    {h_column(column, part), h_part(part), work.row + offset + b / kAcross * 64});
    }
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void store(const Params& p, const Work& work,
                                               const Staging<kShape>& staging, int offset, int b) {
    constexpr int kAcross = kShape.n / 64;
    const int column = work.column + b % kAcross * 64;
    const int row = offset + b / kAcross * 64;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      store_ragged(p.dh, staging.box(h_box<kShape>(b % 2) + part), h_column(column, part),
                   h_part(part), work, row);
    }
    store_ragged(p.a, staging.box(a_box<kShape>(b % 2)), column, 0, work, row);
    staging.commit();
  }

  struct Place {
    int half;
    int set;
  };

  /// One 64x64 block: H in boxes becomes dH, A' beside it. Sixteen columns at a time, because the
  /// accumulator leaves no room for more; not even for the rows' scales, which are read each time.
  template <TileShape kShape, class Ahead>
  static __device__ __forceinline__ void block(const Params& p, const float* acc,
                                               const Staging<kShape>& staging, Place at,
                                               float (&score)[2], Ahead ahead) {
    const int box = h_box<kShape>(at.set);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float scale[2] = {staging.row_scale(at.half, 0), staging.row_scale(at.half, 1)};
      Words gate, up, a;
      read(staging, box, c, gate, up);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* pair = acc + c * 8 + 2 * i;
        a[i] = element_pair(p, gate[i], up[i], pair, scale[i & 1], score[i & 1]);
      }
      write(staging, box, c, gate, up);
      if (c == 0) ahead();
      ptx::store_matrices(staging.place(a_box<kShape>(at.set), 2 * c), a);
    }
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void read(const Staging<kShape>& staging, int box, int c,
                                              Words& gate, Words& up) {
    if constexpr (kPaired) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        std::uint32_t low, high;  // (gate, up) of two neighbouring columns
        ptx::load_words(low, high, pair_place(staging.box(box + c / 2), c % 2 * 4 + i));
        gate[i] = __byte_perm(low, high, 0x5410);
        up[i] = __byte_perm(low, high, 0x7632);
      }
    } else {
      ptx::load_matrices(gate, staging.place(box, 2 * c));
      if constexpr (kGated) ptx::load_matrices(up, staging.place(box + 1, 2 * c));
    }
  }
  template <TileShape kShape>
  static __device__ __forceinline__ void write(const Staging<kShape>& staging, int box, int c,
                                               const Words& gate, const Words& up) {
    if constexpr (kPaired) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        ptx::store_words(pair_place(staging.box(box + c / 2), c % 2 * 4 + i),
                         __byte_perm(gate[i], up[i], 0x5410), __byte_perm(gate[i], up[i], 0x7632));
      }
    } else {
      ptx::store_matrices(staging.place(box, 2 * c), gate);
      if constexpr (kGated) ptx::store_matrices(staging.place(box + 1, 2 * c), up);
    }
  }
  /// Of word i in a box of alternating columns, which 32 columns of A fill.
  static __device__ __forceinline__ std::uint32_t pair_place(std::uint32_t box, int i) {
    const int lane = threadIdx.x & 31;
    const int swizzle = lane >> 2;
    const int row = ((threadIdx.x >> 5) & 3) * 16 + (i & 1) * 8 + swizzle;
    const int chunk = (i >> 1) * 2 + ((lane & 3) >> 1);
    return box + row * 128 + ((chunk ^ swizzle) << 4) + (lane & 1) * 8;
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
  template <TileShape kShape>
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
        p.score_parts[at + work.column / kShape.n] = sum;
      }
    }
  }
};

}  // namespace sonicmoe::cuda
