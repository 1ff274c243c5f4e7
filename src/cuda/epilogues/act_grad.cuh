// Epilogue of dH. The accumulator is dA' = dO W2, never rounded. From H (loaded under the products)
// and the row's score s: dH = r(act'(H) s dA'), A' = r(s act(H)), dS = sum of dA' r(act(H)).
//
// Blocks of 64 rows by 32 columns of A go round four sets of boxes, in which dH overwrites H, and
// two boxes of A'. The loads of the first three start before the products of the tile, that of
// block b + 3 once the stores of block b - 1 have been read: two blocks before it is needed. The
// last block is held in fp32 and follows under the next tile's products, whose third load, coming
// after it, continues the round. One thread of each warp issues copies: a copy holds its warp up
// for some hundred clocks, and the others at the next barrier.
#pragma once

#include "cuda/epilogues/activation.cuh"
#include "cuda/epilogues/store.cuh"

namespace sonicmoe::cuda {

/// Columns of A in a block, and of a box.
inline constexpr int kGradColumns = 32;

struct ActGradParams {
  CUtensorMap h_in;  ///< (column, part, row), box 32 x 1 x 64; kPaired: one part of 2n columns
  RaggedMap dh;      ///< (column, part, row, base), the same
  RaggedMap a;       ///< A'
  const float* row_weight;  ///< (C) s; null: 1
  float* score_parts;       ///< (C, score_tiles): dS of a row and tile of columns
  std::int32_t score_tiles;
  std::int32_t width;  ///< n
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
    float products[kGradColumns / 2];  ///< of the last block, fp32
    float scale[2];                    ///< of this lane's rows
    float score[2];                    ///< of the blocks before it
    std::uint32_t parity;              ///< of the next load of every set
    bool held;
  };
  static constexpr int late_at(int, int) { return 2; }

  template <TileShape kShape>
  static __device__ __forceinline__ void begin(const Params& p, const State& state,
                                               const Work& work, const Staging<kShape>& staging,
                                               Rows rows) {
    static_assert(kShape.n == kBlocks * kGradColumns && kShape.halves() == 1);
    static_assert(kShape.boxes * kBoxBytes >= (2 * kLoadSets + kOwnBoxes) * kHalfBox);
    // Of the tile before, the stores of the last block but one may still be read where one is held.
    if (leads() && warp() == kLoadingWarp) {
      for (int b = 0; b < (state.held ? kAhead - 1 : kAhead); b++) {
        load(p, work, staging, rows.offset, b);
      }
    }
    // By cp.async, which nothing waits for before the epilogue; a warp's own rows.
    const int lane = threadIdx.x & 31;
    const int row = rows.offset + warp() * 16 + lane;
    if (p.row_weight != nullptr && lane < 16 && row < work.left) {
      staging.copy_scale(warp() * 16 + lane, p.row_weight + work.row + row);
    }
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void run(const Params& p, State& state,
                                             float (&acc)[kShape.halves()][kShape.n / 2],
                                             const Work& work, const Staging<kShape>& staging,
                                             Rows rows) {
    ptx::copies_wait();  // the scales are set
    __syncwarp();
    float score[2] = {0.0f, 0.0f};
    // Sixteen columns ask for the scales anew: the accumulator leaves no registers for them.
    const auto scale = [&](int which) { return staging.row_scale(0, which); };
#pragma unroll
    for (int b = 0; b < kHeldBlock; b++) {
      staging.loaded(b % kLoadSets).wait(state.parity);
      // Columns past the width may not have been multiplied.
      if (work.column + b * kGradColumns < p.width) {
        block(p, &acc[0][b * (kGradColumns / 2)], staging, b, scale, score);
      }
      const Place place{work.column, rows.offset - work.left, work.row + work.left};
      // What late() did is behind all warps now.
      if (b == kHeldBlock - 1 && staging.elected()) staging.note(place);
      publish(staging);
      store(p, staging, b, place);
      if (b + kAhead < kBlocks) load_next(p, work, staging, rows.offset, b + kAhead);
      if (b % kLoadSets == kLoadSets - 1) state.parity ^= 1;
    }
#pragma unroll
    for (int i = 0; i < kGradColumns / 2; i++) {
      state.products[i] = acc[0][kHeldBlock * (kGradColumns / 2) + i];
    }
#pragma unroll
    for (int which = 0; which < 2; which++) {
      state.scale[which] = scale(which);
      state.score[which] = score[which];
    }
    __syncwarp();  // the next tile's scales may come
    state.held = true;
  }

  /// Finishes the tile before, then loads the block of `work` that had no room yet.
  template <TileShape kShape>
  static __device__ __forceinline__ void late(const Params& p, State& state, const Work& work,
                                              const Staging<kShape>& staging, Rows rows) {
    staging.loaded(kHeldBlock % kLoadSets).wait(state.parity);
    if (staging.noted().column + kHeldBlock * kGradColumns < p.width) {
      const auto scale = [&](int which) { return state.scale[which]; };
      block(p, state.products, staging, kHeldBlock, scale, state.score);
    }
    publish(staging);
    const Place place = staging.noted();
    store(p, staging, kHeldBlock, place);
    if (rows.halves > 0) load_next(p, work, staging, rows.offset, kAhead - 1);
    put_scores<kShape>(p, place, state.score);
    state.parity ^= 1;
    state.held = false;
  }

 private:
  /// Sixteen columns of a block, words as in Fragment.
  using Words = std::uint32_t[4];

  static constexpr int kHalfBox = kBoxBytes / 2;  // 64 rows of 64 bytes
  static constexpr int kOwnBoxes = 2;             // of A'
  static constexpr int kAhead = kLoadSets - 1;
  static constexpr int kBlocks = 256 / kGradColumns;
  static constexpr int kHeldBlock = kBlocks - 1;
  static_assert(kBlocks % kLoadSets == 0, "the sets take turns");

  /// Who issues what.
  static constexpr int kOwnWarp = 2;  // stores A'; the ones below store dH, by part
  static constexpr int kLoadingWarp = 3;
  static __device__ __forceinline__ bool leads() { return (threadIdx.x & 31) == 0; }
  static __device__ __forceinline__ int warp() { return (threadIdx.x >> 5) & 3; }

  /// Boxes of H (by part) and of A' of block b.
  template <TileShape kShape>
  static __device__ __forceinline__ std::uint32_t h_box(const Staging<kShape>& staging, int b) {
    return staging.box(0) + b % kLoadSets * 2 * kHalfBox;
  }
  template <TileShape kShape>
  static __device__ __forceinline__ std::uint32_t a_box(const Staging<kShape>& staging, int b) {
    return staging.box(0) + (2 * kLoadSets + b % kOwnBoxes) * kHalfBox;
  }
  /// First column and part of box `part` of a block whose first column of A is `column`.
  static __device__ __forceinline__ int h_column(int column, int part) {
    return kPaired ? 2 * column + kGradColumns * part : column;
  }
  static constexpr int h_part(int part) { return kPaired ? 0 : part; }

  template <TileShape kShape>
  static __device__ __forceinline__ void load(const Params& p, const Work& work,
                                              const Staging<kShape>& staging, int offset, int b) {
    const int column = work.column + b * kGradColumns;
    const ptx::Mbarrier loaded = staging.loaded(b % kLoadSets);
    loaded.arrive_expecting(kParts * kHalfBox);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      ptx::tma_load(h_box(staging, b) + part * kHalfBox, &p.h_in, loaded,
                    {h_column(column, part), h_part(part), work.row + offset});
    }
  }
  /// After publish(), which frees the boxes.
  template <TileShape kShape>
  static __device__ __forceinline__ void load_next(const Params& p, const Work& work,
                                                   const Staging<kShape>& staging, int offset,
                                                   int b) {
    if (leads() && warp() == kLoadingWarp) load(p, work, staging, offset, b);
  }

  /// A block is written, and the stores of the one before have been read.
  template <TileShape kShape>
  static __device__ __forceinline__ void publish(const Staging<kShape>& staging) {
    if (leads()) ptx::tma_wait_read();
    staging.publish();
  }
  template <TileShape kShape>
  static __device__ __forceinline__ void store(const Params& p, const Staging<kShape>& staging,
                                               int b, const Place& place) {
    const bool own = warp() == kOwnWarp;
    const int part = own ? 0 : warp();
    if (!leads() || part >= kParts) return;
    const int column = place.column + b * kGradColumns;
    store_ragged(own ? p.a : p.dh, own ? a_box(staging, b) : h_box(staging, b) + part * kHalfBox,
                 own ? column : h_column(column, part), own ? 0 : h_part(part), place);
    staging.commit();
  }

  /// One block: H in boxes becomes dH, A' beside it. Sixteen columns at a time, because the
  /// accumulator leaves no room for more.
  template <TileShape kShape, class Scale>
  static __device__ __forceinline__ void block(const Params& p, const float* acc,
                                               const Staging<kShape>& staging, int b,
                                               Scale row_scale, float (&score)[2]) {
    const std::uint32_t h = h_box(staging, b);
#pragma unroll
    for (int c = 0; c < kGradColumns / 16; c++) {
      const float scale[2] = {row_scale(0), row_scale(1)};
      Words gate, up, a;
      read(h, c, gate, up);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* pair = acc + c * 8 + 2 * i;
        a[i] = element_pair(p, gate[i], up[i], pair, scale[i & 1], score[i & 1]);
      }
      write(h, c, gate, up);
      ptx::store_matrices(place(a_box(staging, b), c), a);
    }
  }

  static __device__ __forceinline__ void read(std::uint32_t h, int c, Words& gate, Words& up) {
    if constexpr (kPaired) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        std::uint32_t low, high;  // (gate, up) of two neighbouring columns
        ptx::load_words(low, high, pair_place(h + c * kHalfBox, i));
        gate[i] = __byte_perm(low, high, 0x5410);
        up[i] = __byte_perm(low, high, 0x7632);
      }
    } else {
      ptx::load_matrices(gate, place(h, c));
      if constexpr (kGated) ptx::load_matrices(up, place(h + kHalfBox, c));
    }
  }
  static __device__ __forceinline__ void write(std::uint32_t h, int c, const Words& gate,
                                               const Words& up) {
    if constexpr (kPaired) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        ptx::store_words(pair_place(h + c * kHalfBox, i), __byte_perm(gate[i], up[i], 0x5410),
                         __byte_perm(gate[i], up[i], 0x7632));
      }
    } else {
      ptx::store_matrices(place(h, c), gate);
      if constexpr (kGated) ptx::store_matrices(place(h + kHalfBox, c), up);
    }
  }
  /// This lane's address of columns 16c.. in a box: row lane % 8 of matrix lane / 8, swizzled.
  static __device__ __forceinline__ std::uint32_t place(std::uint32_t box, int c) {
    const int lane = threadIdx.x & 31;
    const int row = ((threadIdx.x >> 5) & 3) * 16 + (lane & 15);
    const int chunk = 2 * c + (lane >> 4);
    return box + row * 64 + ((chunk ^ (lane >> 1 & 3)) << 4);
  }
  /// Of word i in a box of alternating columns, which sixteen columns of A fill.
  static __device__ __forceinline__ std::uint32_t pair_place(std::uint32_t box, int i) {
    const int lane = threadIdx.x & 31;
    const int row = ((threadIdx.x >> 5) & 3) * 16 + (i & 1) * 8 + (lane >> 2);
    const int chunk = (i >> 1) * 2 + ((lane & 3) >> 1);
    return box + row * 64 + ((chunk ^ (lane >> 3)) << 4) + (lane & 1) * 8;
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
  static __device__ __forceinline__ void put_scores(const Params& p, const Place& place,
                                                    const float (&score)[2]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int which = 0; which < 2; which++) {
      float sum = score[which];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = place.below + warp() * 16 + which * 8 + (lane >> 2);
      if ((lane & 3) == 0 && row < 0) {
        const std::int64_t at = static_cast<std::int64_t>(place.end + row) * p.score_tiles;
        p.score_parts[at + place.column / kShape.n] = sum;
      }
    }
  }
};

}  // namespace sonicmoe::cuda
