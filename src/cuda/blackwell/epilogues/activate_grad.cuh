// Epilogue of dH. The accumulator D is dA' = dO W2. Computes dH = r(act'(H) s dA'), A' = r(s
// act(H)), and the part of dS over each 64 columns.
//
// A lane computes 32 columns of A in its row at a time. Staging buffers 0 and 1 have H of these
// columns, which becomes dH; buffer 2 has A':
//
//   | gate and up | buffer 0              | buffer 1                |
//   | split       | 32 gates              | 32 ups                  |
//   | alternating | H of the first 16     | H of the other 16       |
//   | no gate     | 32 of H               | unused                  |
#pragma once

#include "cuda/blackwell/epilogues/warp_tile.cuh"
#include "cuda/portable/epilogues/hidden_rows.cuh"
#include "cuda/portable/params.h"

namespace sonicmoe::cuda::blackwell {

template <class Element>
struct ActivateGrad {
  using Params = portable::ActivateGradParams;
  static constexpr bool kMayBeginAtOnce = false;

  static __device__ __forceinline__ void run(const Params& p, const WarpTile& tile) {
    const bool exists = tile.lane < tile.rows;
    const std::int64_t row = std::int64_t{tile.row} + tile.lane;
    const float weight = exists && p.row_weight != nullptr ? __ldg(p.row_weight + row) : 1.0f;
    const int first = tile.column + tile.first_half * tile.half_columns;
    float score = 0.0f;
#pragma unroll 1
    for (int c = 0; c < tile.halves * tile.half_columns; c += kPiece) {
      const int column = first + c;
      if (column >= p.act.width) break;
      score += run_piece(p, tile, c, column, weight);
      const bool is_last = c % portable::kWarpColumns != 0 || column + kPiece >= p.act.width;
      if (!is_last) continue;
      if (exists) p.score_parts[row * p.score_tiles + column / portable::kWarpColumns] = score;
      score = 0.0f;
    }
  }

 private:
  static constexpr int kBufferOfA = 2;

  /// Columns `column` and on of A, which are D's columns `c` and on of the warp. Returns their part
  /// of the score of the lane's row.
  static __device__ __forceinline__ float run_piece(const Params& p, const WarpTile& tile, int c,
                                                    int column, float weight) {
    __syncwarp();
    for_each_buffer(
        p, tile, const_cast<std::uint8_t*>(p.h), column, [&](const Target& from, int buffer) {
          for_each_chunk<kPiece>(tile, from, buffer, [](const uint4* memory, std::uint32_t staged) {
            ptx::store_shared16(staged, *memory);
          });
        });
    __syncwarp();
    portable::GradPiece piece;
    piece.weight = weight;
#pragma unroll 1
    for (int chunk = 0; chunk < min(kPiece, p.act.width - column) / 8; chunk++) {
      tile.load(piece.grad, c + chunk * 8);
      run_chunk(p, tile, chunk, piece);
    }
    store_gradients(p, tile, column);
    return piece.score;
  }

  /// Eight columns of the lane's row.
  static __device__ __forceinline__ void run_chunk(const Params& p, const WarpTile& tile, int chunk,
                                                   portable::GradPiece& piece) {
    const bool exists = tile.lane < tile.rows;
    const bool has_second = exists && p.act.layout != GateLayout::kNone;
    portable::HiddenQuads quads{};
    if (exists) quads.first = ptx::load_shared16(staged_hidden(p.act, tile, chunk, 0));
    if (has_second) quads.second = ptx::load_shared16(staged_hidden(p.act, tile, chunk, 1));
    portable::HiddenWords h = portable::words_of(p.act, quads);
    if (p.act.layout == GateLayout::kInterleaved) h.exchange();
    portable::differentiate<Element>(p.act, h, piece);
    stage_gradients(p.act, tile, chunk, h, piece.a);
  }

  /// Where the lane's H or dH of eight columns of A is staged: 16 bytes of gate or of up, or the
  /// first or second 16 bytes of both.
  static __device__ __forceinline__ std::uint32_t staged_hidden(const portable::Activating& act,
                                                                const WarpTile& tile, int chunk,
                                                                int which) {
    return act.layout == GateLayout::kInterleaved
               ? tile.staged(chunk / 2, tile.lane, chunk % 2 * 2 + which)
               : tile.staged(which, tile.lane, chunk);
  }

 public:
  /// Writes dH, of which `h` has gate and up apart, and A' of eight columns to the staging buffers.
  static __device__ __forceinline__ void stage_gradients(const portable::Activating& act,
                                                         const WarpTile& tile, int chunk,
                                                         portable::HiddenWords h,
                                                         const std::uint32_t (&a)[4]) {
    const bool interleaved = act.layout == GateLayout::kInterleaved;
    if (interleaved) h.exchange();
    ptx::store_shared16(staged_hidden(act, tile, chunk, 0),
                        interleaved ? h.quad(0) : portable::quad_of(h.gate));
    if (act.layout != GateLayout::kNone) {
      ptx::store_shared16(staged_hidden(act, tile, chunk, 1),
                          interleaved ? h.quad(1) : portable::quad_of(h.up));
    }
    ptx::store_shared16(tile.staged(kBufferOfA, tile.lane, chunk), portable::quad_of(a));
  }
  /// Stores dH and A' of kPiece columns from the staging buffers.
  static __device__ __forceinline__ void store_gradients(const Params& p, const WarpTile& tile,
                                                         int column) {
    __syncwarp();
    for_each_buffer(p, tile, p.dh, column,
                    [&](const Target& to, int buffer) { store_staged<kPiece>(tile, to, buffer); });
    store_staged<kPiece>(tile,
                         {p.a.data + tile.row * p.a.row_bytes + column * kElementBytes,
                          p.a.row_bytes, p.act.width - column},
                         kBufferOfA);
  }

 private:
  /// Calls call(where, buffer) for the staging buffers of H or dH.
  template <class Call>
  static __device__ __forceinline__ void for_each_buffer(const Params& p, const WarpTile& tile,
                                                         std::uint8_t* hidden, int column,
                                                         const Call& call) {
    const int n = p.act.width;
    const bool interleaved = p.act.layout == GateLayout::kInterleaved;
    std::uint8_t* at = hidden + tile.row * p.h_row_bytes;
    const int first = interleaved ? 2 * column : column;
    const int second = interleaved ? first + kPiece : n + column;
    const int end = interleaved ? 2 * n : n;
    call(Target{at + first * kElementBytes, p.h_row_bytes, end - first}, 0);
    if (p.act.layout == GateLayout::kNone) return;
    call(
        Target{at + second * kElementBytes, p.h_row_bytes, interleaved ? end - second : n - column},
        1);
  }
};

}  // namespace sonicmoe::cuda::blackwell
