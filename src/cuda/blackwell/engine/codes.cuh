// Products of e4m3 codes with scales (MXFP8): the warp that writes the scales to shared memory, and
// the products of a k tile. Everything else is as in products of 16-bit elements.
//
// A scale is a power of two for each 128 codes of K. MXFP8 has one for each 32: the four steps of a
// k tile all read byte 0 of a row's word, which has the exponent.
#pragma once

#include "cuda/blackwell/engine/kernel.cuh"
#include "cuda/ptx/store16.cuh"
#include "cuda/ptx/tma.cuh"

namespace sonicmoe::cuda::blackwell {

/// Multiplies k tiles of codes.
class CodeSteps {
 public:
  template <class Params>
  __device__ __forceinline__ CodeSteps(const Params&, std::uint32_t tensor) : tensor_(tensor) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    has_second_half_ = tile.half_columns > kBoxColumns;
    descriptor_ = ptx::code_product_descriptor(kCtas * kCtaRows, 2 * tile.half_columns);
  }
  /// As ElementSteps::run(). Each stage has its own columns for scales, so no copy waits for
  /// products of earlier stages.
  __device__ __forceinline__ void run(const Cta& cta, int stage, std::uint32_t d,
                                      bool accumulates) const {
    constexpr std::uint32_t kNextChunk = kChunkBytes / 16;  // in a descriptor
    const std::uint32_t rows = tensor_ + kScalesColumn + stage * kStageScaleColumns;
    const std::uint32_t columns = rows + kChunkColumns;
    const std::uint64_t chunk = ptx::chunk_descriptor(cta.chunks(stage));
    ptx::copy_scales_pair(rows, chunk);
    ptx::copy_scales_pair(columns, chunk + kNextChunk);
    if (has_second_half_) ptx::copy_scales_pair(columns + kChunkColumns, chunk + 2 * kNextChunk);
    const std::uint64_t a = ptx::matrix_descriptor(cta.a(stage));
    const std::uint64_t b = ptx::matrix_descriptor(cta.b(stage));
    const std::uint32_t step = ptx::next_16_of_k(false);  // the bytes of 32 codes
#pragma unroll
    for (int k = 0; k < kDepth / 16; k++) {
      ptx::multiply_codes_pair(d, a + k * step, b + k * step, descriptor_, rows, columns,
                               accumulates || k != 0);
    }
  }

 private:
  std::uint32_t tensor_;
  std::uint32_t descriptor_ = 0;
  bool has_second_half_ = false;
};

/// The scales that a lane loads for a tile: of rows `lane`, `lane` + 32, + 64 and + 96 of the CTA,
/// and of the two halves of the columns. Their codes are zeros where nothing exists, so any scale
/// will do there: rows past the end of the expert take that of its last row, and a second half that
/// does not exist takes that of the first one.
class LaneScales {
 public:
  __device__ __forceinline__ LaneScales(const CodeScales& s, const RowTilesParams& p,
                                        const Tile& tile, int rank, int lane)
      : row_step_(s.row_block_stride), depth_step_(s.depth_stride) {
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const int row = tile.row + min(rank * kCtaRows + 32 * i + lane, tile.rows - 1);
      rows_[i] = s.rows + (p.index != nullptr ? __ldca(p.index + row) : row) * s.row_stride;
    }
    const std::int64_t block = tile.column / kChunkRows;
    halves_[0] = s.weights + tile.expert * s.expert_stride + block * s.column_stride;
    halves_[1] = halves_[0] + (tile.half_columns > kBoxColumns ? s.half_stride : 0);
  }

  /// The exponents of the next k tile.
  __device__ __forceinline__ void load(uint4& rows, std::uint32_t (&halves)[2]) {
    std::uint32_t of_row[kRows];
#pragma unroll
    for (int i = 0; i < kRows; i++) of_row[i] = exponent(rows_[i], row_step_);
    rows = {of_row[0], of_row[1], of_row[2], of_row[3]};
#pragma unroll
    for (int i = 0; i < 2; i++) halves[i] = exponent(halves_[i], depth_step_);
  }

 private:
  static constexpr int kRows = kChunkRows / 32;

  /// Of a scale, which is a positive power of two; `at` goes on to the next one.
  static __device__ __forceinline__ std::uint32_t exponent(const float*& at, std::int64_t step) {
    const float scale = __ldca(at);
    at += step;
    return __float_as_uint(scale) >> 23;
  }

  const float* rows_[kRows];
  const float* halves_[2];
  std::int64_t row_step_, depth_step_;
};

/// The scale warp of each CTA: writes the chunks of a stage and arrives at the pair's `full`.
__device__ __forceinline__ void load_scales(const CodeScales& scales, const RowTilesParams& p,
                                            const Cta& cta, int lane) {
  RowTiles tiles(p, cta, QueueReader::kWarp);
  StageRing ring;
  for (Tile tile; tiles.next(tile);) {
    LaneScales from(scales, p, tile, cta.rank, lane);
#pragma unroll 1
    for (int kt = 0; kt < tile.k_tiles; kt++) {
      uint4 rows;
      std::uint32_t halves[2];
      from.load(rows, halves);  // before the wait, which hides the latency
      const bool in_time = cta.empty(ring.at).wait(ring.parity ^ 1);
      const std::uint32_t to = cta.chunks(ring.at) + lane * 16;
      if (in_time) {
        ptx::store_shared16(to, rows);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          ptx::store_shared16(to + (1 + i) * kChunkBytes,
                              {halves[i], halves[i], halves[i], halves[i]});
        }
      }
      ptx::fence_async_shared();
      __syncwarp();
      if (lane == 0 && in_time) cta.full(ring.at).arrive_at(0);
      ring.next();
    }
  }
}

template <class Epilogue_>
struct CodesProductOf {
  using Epilogue = Epilogue_;
  using Params = CodesProductParams<typename Epilogue::Params>;
  using Tiles = RowTiles;
  using Tile = blackwell::Tile;
  using Steps = CodeSteps;
  static constexpr int kThreads = kCodesThreads;
  static constexpr int kAccumulators = 1;
  static constexpr int kLoaders = 1 + kCtas;
  static constexpr int kReaders = kQueueReaders + kCtas;

  static __device__ __forceinline__ void load_by_column_warp(const Params& p, const Cta& cta, int) {
    if (ptx::elect()) load_columns(p.segments, p.tiles, cta);
  }
  static __device__ __forceinline__ void load_by_row_warp(const Params& p, const Cta& cta, int warp,
                                                          int lane) {
    load_rows(p.segments, p.tiles, cta, warp, lane);
  }
  static __device__ __forceinline__ void load_by_scale_warp(const Params& p, const Cta& cta,
                                                            int lane) {
    load_scales(p.scales, p.tiles, cta, lane);
  }
};

}  // namespace sonicmoe::cuda::blackwell
