// Epilogue of dH. The accumulator is dA' = dO W2, never rounded. From H and the row's score s:
// dH = r(act'(H) s dA'), A' = r(s act(H)), dS = sum of dA' r(act(H)).
//
// H comes through the ring, behind a tile's products, in chunks of 64 columns of A: both parts take
// the place of B in a stage. dH overwrites them, A' takes the place of A, and all are stored out of
// the stage, which is given back once the next chunk is worked through, that of the last chunk
// under the next tile's first products. One thread of each warp issues copies: a copy holds its
// warp up for some hundred clocks, and the others at the next barrier.
#pragma once

#include "cuda/hopper/epilogues/store.cuh"
#include "cuda/math/activation_words.cuh"

namespace sonicmoe::cuda {

/// Columns of A in a chunk, and of a box.
inline constexpr int kGradColumns = 64;

struct ActGradParams {
  CUtensorMap h_in;  ///< (column, part, row), box 64 x 1 x 128; kPaired: one part of 2n columns
  RaggedMap dh;      ///< (column, part, row, base), box of 64 rows
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
  using Act = ActivationGradientWords<Element, kKind, kLayout>;
  static constexpr bool kGated = is_gated(kKind);
  static constexpr bool kPaired = kLayout == HLayout::kPaired;
  static constexpr int kParts = kGated ? 2 : 1;
  static_assert(kGated || !kPaired);

  static constexpr int kInputTiles = 256 / kGradColumns;

  /// By the producer: chunk i of H for the rows of a CTA, where there are any.
  template <TileShape kShape>
  static __device__ __forceinline__ void load_input(const Params& p, const Work& work, int i,
                                                    std::uint32_t target, ptx::Mbarrier full) {
    static_assert(kShape.m == 2 * 64 && kShape.b_bytes() == 2 * kPartBytes);
    const int column = work.column + i * kGradColumns;
    if (work.left <= 0 || column >= p.width) {
      full.arrive();
      return;
    }
    full.arrive_expecting(kParts * kPartBytes);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      ptx::tma_load(target + part * kPartBytes, &p.h_in, full,
                    {h_column(column, part), h_part(part), work.row});
    }
  }

  /// The rows' scales, by cp.async, which nothing waits for before run(); a warp's own rows.
  template <TileShape kShape>
  static __device__ __forceinline__ void begin(const Params& p, const Work& work,
                                               const Staging<kShape>& staging, Rows rows) {
    const int lane = threadIdx.x & 31;
    const int row = rows.offset + warp() * 16 + lane;
    if (p.row_weight != nullptr && lane < 16 && row < work.left) {
      staging.copy_scale(warp() * 16 + lane, p.row_weight + work.row + row);
    }
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void run(const Params& p,
                                             float (&acc)[kShape.halves()][kShape.n / 2],
                                             const Work& work, const Staging<kShape>& staging,
                                             Rows rows, const Cta<kShape>& cta,
                                             RingPosition<kShape.stages>& ring) {
    static_assert(kShape.n == kInputTiles * kGradColumns && kShape.halves() == 1);
    ptx::copies_wait();  // the scales are set
    __syncwarp();
    float score[2] = {0.0f, 0.0f};
    const float scale[2] = {staging.row_scale(0, 0), staging.row_scale(0, 1)};
    const Place place{work.column, rows.offset - work.left, work.row + work.left};
#pragma unroll
    for (int i = 0; i < kInputTiles; i++, ring.next()) {
      cta.full(ring.stage).wait(ring.parity);
      const Boxes boxes{cta.b(ring.stage) + rows.offset * 128,
                        cta.a(ring.stage) + rows.offset * 128};
      // Columns past the width may not have been multiplied.
      const bool some = work.column + i * kGradColumns < p.width;
      if (some) block(p, &acc[0][i * (kGradColumns / 2)], boxes, scale, score);
      ptx::fence_async_shared();
      if (i > 0) give_back(cta, ring.before());
      staging.sync();
      if (some) store(p, staging, boxes, i, place);
    }
    put_scores<kShape>(p, place, score);
    __syncwarp();  // the next tile's scales may come
  }

  /// A stage, once this warp's stores out of it have been read.
  template <TileShape kShape>
  static __device__ __forceinline__ void give_back(const Cta<kShape>& cta, int stage) {
    if (leads()) ptx::tma_wait_read();
    __syncwarp();
    release_stage(cta, stage);
  }

 private:
  /// Sixteen columns of a chunk, words as in Fragment.
  using Words = std::uint32_t[4];

  /// Of a warpgroup in a stage: of H, its first part, and of A'.
  struct Boxes {
    std::uint32_t h;
    std::uint32_t a;
  };

  static constexpr int kPartBytes = 2 * kBoxBytes;  // of H in a stage: 128 rows of 128 bytes

  /// Who issues what.
  static constexpr int kOwnWarp = 2;  // stores A'; the ones below store dH, by part
  static __device__ __forceinline__ bool leads() { return (threadIdx.x & 31) == 0; }
  static __device__ __forceinline__ int warp() { return (threadIdx.x >> 5) & 3; }

  /// First column and part of box `part` of a chunk whose first column of A is `column`.
  static __device__ __forceinline__ int h_column(int column, int part) {
    return kPaired ? 2 * column + kGradColumns * part : column;
  }
  static constexpr int h_part(int part) { return kPaired ? 0 : part; }

  template <TileShape kShape>
  static __device__ __forceinline__ void store(const Params& p, const Staging<kShape>& staging,
                                               const Boxes& boxes, int i, const Place& place) {
    const bool own = warp() == kOwnWarp;
    const int part = own ? 0 : warp();
    if (!leads() || part >= kParts) return;
    const int column = place.column + i * kGradColumns;
    store_ragged(own ? p.a : p.dh, own ? boxes.a : boxes.h + part * kPartBytes,
                 own ? column : h_column(column, part), own ? 0 : h_part(part), place);
    staging.commit();
  }

  /// One chunk: H in boxes becomes dH, A' beside it. Sixteen columns at a time, because the
  /// accumulator leaves no room for more; the next sixteen are read meanwhile.
  static __device__ __forceinline__ void block(const Params& p, const float* acc,
                                               const Boxes& boxes, const float (&scale)[2],
                                               float (&score)[2]) {
    constexpr int kSteps = kGradColumns / 16;
    Words first[2], second[2];
    read(boxes.h, 0, first[0], second[0]);
#pragma unroll
    for (int c = 0; c < kSteps; c++) {
      if (c + 1 < kSteps) read(boxes.h, c + 1, first[(c + 1) & 1], second[(c + 1) & 1]);
      Words a;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* grad = acc + c * 8 + 2 * i;
        a[i] = Act::run(p.scalars, first[c & 1][i], second[c & 1][i], grad, scale[i & 1],
                        score[i & 1]);
      }
      write(boxes.h, c, first[c & 1], second[c & 1]);
      ptx::store_matrices(place(boxes.a, c), a);
    }
  }

  /// Words of H: gates of two columns and their ups, or (kPaired) a column's gate and up and the
  /// next one's.
  static __device__ __forceinline__ void read(std::uint32_t h, int c, Words& first, Words& second) {
    if constexpr (kPaired) {
#pragma unroll
      for (int i = 0; i < 4; i++) ptx::load_words(first[i], second[i], pair_place(h, c, i));
    } else {
      ptx::load_matrices(first, place(h, c));
      if constexpr (kGated) ptx::load_matrices(second, place(h + kPartBytes, c));
    }
  }
  static __device__ __forceinline__ void write(std::uint32_t h, int c, const Words& first,
                                               const Words& second) {
    if constexpr (kPaired) {
#pragma unroll
      for (int i = 0; i < 4; i++) ptx::store_words(pair_place(h, c, i), first[i], second[i]);
    } else {
      ptx::store_matrices(place(h, c), first);
      if constexpr (kGated) ptx::store_matrices(place(h + kPartBytes, c), second);
    }
  }
  /// This lane's address of columns 16c.. in a box: row lane % 8 of matrix lane / 8, swizzled.
  static __device__ __forceinline__ std::uint32_t place(std::uint32_t box, int c) {
    const int lane = threadIdx.x & 31;
    const int row = warp() * 16 + (lane & 15);
    return box + row * 128 + (((2 * c + (lane >> 4)) ^ (lane & 7)) << 4);
  }
  /// Of word i in boxes of alternating columns, of which sixteen columns of A fill half a one.
  static __device__ __forceinline__ std::uint32_t pair_place(std::uint32_t box, int c, int i) {
    const int lane = threadIdx.x & 31;
    const int row = warp() * 16 + (i & 1) * 8 + (lane >> 2);
    const int chunk = (c & 1) * 4 + (i >> 1) * 2 + ((lane & 3) >> 1);
    return box + (c >> 1) * kPartBytes + row * 128 + ((chunk ^ (lane >> 2)) << 4) + (lane & 1) * 8;
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
