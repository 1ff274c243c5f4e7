// Epilogue of dH. The accumulator is dA' = dO W2 and is never rounded. From H and the row's score
// s: dH = r(act'(H) s dA'), A' = r(s act(H)), dS = sum of dA' r(act(H)).
//
// H comes through the operand pipeline: after a tile's k tiles the producer fills one stage for
// each 64 columns of A. The memory of such a stage:
//
//   memory of B, gate or first part    H, then dH
//   memory of B, up or second part     H, then dH
//   memory of A                        unused, then A'
//
// TMA stores the results from the memory of the stage. A stage is released after the results of the
// next stage are computed, the tile's last stage under the next tile's first products: by then TMA
// has usually read it.
//
// One thread in each of two or three warps issues one store. Issuing a store takes a warp some
// hundred clocks: if one warp issued all of them, the others would wait for it at the next barrier.
#pragma once

#include "cuda/hopper/engine/pipeline.cuh"
#include "cuda/hopper/epilogues/ragged.cuh"
#include "cuda/hopper/ptx/stmatrix.cuh"
#include "cuda/math/activation_words.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda {

template <class Element, ActivationKind kKind, GateLayout kLayout>
struct ActivateGradRows {
  using Params = ActivateGradRowsParams;
  using Act = ActivationGradientWords<Element, kKind, kLayout>;
  static constexpr bool kGated = is_gated(kKind);
  static constexpr bool kInterleaved = kLayout == GateLayout::kInterleaved;
  static constexpr int kParts = kGated ? 2 : 1;
  static_assert(kGated || !kInterleaved);

  static constexpr int kInputTiles = 256 / kGradColumns;

  /// Called by the producer: loads input stage i, for all rows of the CTA. Without rows, or past
  /// the width, it arrives without a load: consumers wait for every input stage.
  template <TileShape kShape>
  static __device__ __forceinline__ void load_input(const Params& p, const CtaTile& tile, int i,
                                                    std::uint32_t target, ptx::Mbarrier full) {
    static_assert(kShape.m == 2 * 64 && kShape.b_bytes() == 2 * kPartBytes);
    const int column = tile.column + i * kGradColumns;
    if (tile.valid_rows <= 0 || column >= p.width) {
      full.arrive();
      return;
    }
    full.arrive_expecting(kParts * kPartBytes);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      ptx::tma_load(target + part * kPartBytes, &p.h_in, full,
                    {h_column(column, part), h_part(part), tile.row});
    }
  }

  /// Before the products: each warp copies its rows' scores by cp.async. run() waits for the
  /// copies.
  template <TileShape kShape>
  static __device__ __forceinline__ void begin(const Params& p, const CtaTile& tile,
                                               const Staging<kShape>& staging, Rows rows) {
    const int lane = threadIdx.x & 31;
    const int row = rows.offset + warp() * 16 + lane;
    if (p.row_weight != nullptr && lane < 16 && row < tile.valid_rows) {
      staging.copy_scale(warp() * 16 + lane, p.row_weight + tile.row + row);
    }
  }

  template <TileShape kShape>
  static __device__ __forceinline__ void run(const Params& p,
                                             float (&acc)[kShape.row_blocks()][kShape.n / 2],
                                             const CtaTile& tile, const Staging<kShape>& staging,
                                             Rows rows, const Cta<kShape>& cta,
                                             RingPosition<kShape.stages>& ring) {
    static_assert(kShape.n == kInputTiles * kGradColumns && kShape.row_blocks() == 1);
    ptx::copies_wait();  // for begin()'s copies
    __syncwarp();
    float score[2] = {0.0f, 0.0f};
    const float scale[2] = {staging.row_scale(0, 0), staging.row_scale(0, 1)};
    const TileOrigin origin{tile.column, rows.offset - tile.valid_rows, tile.row + tile.valid_rows};
#pragma unroll
    for (int i = 0; i < kInputTiles; i++, ring.next()) {
      cta.full(ring.stage).wait(ring.parity);
      const Boxes boxes{cta.b(ring.stage) + rows.offset * 128,
                        cta.a(ring.stage) + rows.offset * 128};
      // Past the width the accumulators are undefined.
      const bool inside = tile.column + i * kGradColumns < p.width;
      if (inside) differentiate(p, &acc[0][i * (kGradColumns / 2)], boxes, scale, score);
      ptx::fence_async_shared();
      if (i > 0) release_input(cta, ring.previous_stage());
      staging.sync();
      if (inside) store(p, staging, boxes, i, origin);
    }
    store_scores<kShape>(p, origin, score);
    __syncwarp();  // all lanes have read their scales: begin() may overwrite them
  }

  /// Waits until the TMA has read this warp's stores from a stage, then releases the stage.
  template <TileShape kShape>
  static __device__ __forceinline__ void release_input(const Cta<kShape>& cta, int stage) {
    if (issues()) ptx::tma_wait_read();
    __syncwarp();
    release_stage(cta, stage);
  }

 private:
  /// Sixteen columns of a stage, words as in Fragment.
  using Words = std::uint32_t[4];

  /// A warpgroup's rows in a stage: of H (its first part) and of A'.
  struct Boxes {
    std::uint32_t h;
    std::uint32_t a;
  };

  static constexpr int kPartBytes = 2 * kBoxBytes;  // of H in a stage: 128 rows of 128 bytes

  /// The warp that stores A'. Warp 0 stores part 0 of dH, warp 1 part 1.
  static constexpr int kStoresA = 2;
  static __device__ __forceinline__ bool issues() { return (threadIdx.x & 31) == 0; }
  static __device__ __forceinline__ int warp() { return (threadIdx.x >> 5) & 3; }

  /// First column and part, in H, of box `part` of the stage whose first column of A is `column`.
  static __device__ __forceinline__ int h_column(int column, int part) {
    return kInterleaved ? 2 * column + kGradColumns * part : column;
  }
  static constexpr int h_part(int part) { return kInterleaved ? 0 : part; }

  template <TileShape kShape>
  static __device__ __forceinline__ void store(const Params& p, const Staging<kShape>& staging,
                                               const Boxes& boxes, int i,
                                               const TileOrigin& origin) {
    const bool stores_a = warp() == kStoresA;
    const int part = stores_a ? 0 : warp();
    if (!issues() || part >= kParts) return;
    const int column = origin.column + i * kGradColumns;
    store_ragged(stores_a ? p.a : p.dh, stores_a ? boxes.a : boxes.h + part * kPartBytes,
                 stores_a ? column : h_column(column, part), stores_a ? 0 : h_part(part), origin);
    staging.commit();
  }

  /// Replaces H by dH in one stage, and writes A'. Computes sixteen columns at a time, because the
  /// accumulator leaves no registers for more. The next sixteen columns of H are read before that,
  /// to hide the latency of the read.
  static __device__ __forceinline__ void differentiate(const Params& p, const float* acc,
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
      ptx::store_matrices(matrix_address(boxes.a, c), a);
    }
  }

  /// Reads sixteen columns of H, in the words that ActivationGradientWords needs.
  static __device__ __forceinline__ void read(std::uint32_t h, int c, Words& first, Words& second) {
    if constexpr (kInterleaved) {
#pragma unroll
      for (int i = 0; i < 4; i++) ptx::load_words(first[i], second[i], pair_address(h, c, i));
    } else {
      ptx::load_matrices(first, matrix_address(h, c));
      if constexpr (kGated) ptx::load_matrices(second, matrix_address(h + kPartBytes, c));
    }
  }
  static __device__ __forceinline__ void write(std::uint32_t h, int c, const Words& first,
                                               const Words& second) {
    if constexpr (kInterleaved) {
#pragma unroll
      for (int i = 0; i < 4; i++) ptx::store_words(pair_address(h, c, i), first[i], second[i]);
    } else {
      ptx::store_matrices(matrix_address(h, c), first);
      if constexpr (kGated) ptx::store_matrices(matrix_address(h + kPartBytes, c), second);
    }
  }
  /// For ldmatrix and stmatrix on columns 16c .. 16c + 15 of a box: this lane's address, swizzled,
  /// of row lane % 8 of matrix lane / 8.
  static __device__ __forceinline__ std::uint32_t matrix_address(std::uint32_t box, int c) {
    const int lane = threadIdx.x & 31;
    const int row = warp() * 16 + (lane & 15);
    return box + row * 128 + (((2 * c + (lane >> 4)) ^ (lane & 7)) << 4);
  }
  /// Paired: the address of the 8 bytes of word i. Sixteen columns of A are 32 of H, half a box.
  static __device__ __forceinline__ std::uint32_t pair_address(std::uint32_t box, int c, int i) {
    const int lane = threadIdx.x & 31;
    const int row = warp() * 16 + (i & 1) * 8 + (lane >> 2);
    const int chunk = (c & 1) * 4 + (i >> 1) * 2 + ((lane & 3) >> 1);
    return box + (c >> 1) * kPartBytes + row * 128 + ((chunk ^ (lane >> 2)) << 4) + (lane & 1) * 8;
  }

  /// Sums the parts of dS that the four lanes of a row have, in a fixed order, and writes the sum
  /// over this tile's columns.
  template <TileShape kShape>
  static __device__ __forceinline__ void store_scores(const Params& p, const TileOrigin& origin,
                                                      const float (&score)[2]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int which = 0; which < 2; which++) {
      float sum = score[which];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = origin.row + warp() * 16 + which * 8 + (lane >> 2);
      if ((lane & 3) == 0 && row < 0) {
        const std::int64_t at = static_cast<std::int64_t>(origin.base + row) * p.score_tiles;
        p.score_parts[at + origin.column / kShape.n] = sum;
      }
    }
  }
};

}  // namespace sonicmoe::cuda
