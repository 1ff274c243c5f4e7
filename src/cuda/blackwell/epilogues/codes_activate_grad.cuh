// Epilogue of dH in a product of codes. As ActivateGrad; H may be codes, and dH is stored as codes
// too. In each eight columns of D the words of dH's gate, then those of its up replace D.
#pragma once

#include "cuda/blackwell/epilogues/activate_grad.cuh"
#include "cuda/blackwell/epilogues/row_codes.cuh"

namespace sonicmoe::cuda::blackwell {

struct CodesActivateGrad {
  using Params = CodesActivateGradParams;
  using Element = __nv_bfloat16;
  static constexpr bool kMayBeginAtOnce = false;

  static __device__ __forceinline__ void run(const Params& p, const WarpTile& tile) {
    const bool exists = tile.lane < tile.rows;
    const std::int64_t row = std::int64_t{tile.row} + tile.lane;
    const float* const weights = p.rows.row_weight;
    const float weight = exists && weights != nullptr ? __ldg(weights + row) : 1.0f;
#pragma unroll 1
    for (int unit = 0; unit < kTileColumns / kBlock; unit++) {
      const int column = tile.column + unit * kBlock;
      if (column >= p.rows.act.width) break;
      run_block(p, tile, column / kBlock, unit * kBlock, weight);
    }
  }

 private:
  using Rows = ActivateGrad<Element>;
  static constexpr int kParts = 2;

  /// The H of a block in the lane's row.
  struct HiddenRow {
    const std::uint8_t* parts[kParts];
    float scales[kParts];  ///< of codes

    __device__ __forceinline__ HiddenRow(const Params& p, std::int64_t row, int block, int count) {
      const RowCodes& h = p.h_codes;
      const int column = block * kBlock;
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        parts[part] = nullptr;
        scales[part] = 0.0f;
        if (part >= count) continue;
        if (h.codes == nullptr) {
          parts[part] = p.rows.h + row * p.rows.h_row_bytes +
                        (std::int64_t{part} * p.rows.act.width + column) * kElementBytes;
        } else {
          parts[part] = h.codes + row * h.row_bytes + part * h.part_bytes + column;
          scales[part] = h.scales[(part * h.part_blocks + block) * h.block_stride + row];
        }
      }
    }

    /// Eight columns from `column` of the block on.
    __device__ __forceinline__ void read(std::uint32_t (&words)[4], int part, int column,
                                         bool is_coded) const {
      if (parts[part] == nullptr) return;
      if (!is_coded) {
        const auto v = *reinterpret_cast<const uint4*>(parts[part] + column * kElementBytes);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        return;
      }
      const auto codes = *reinterpret_cast<const uint2*>(parts[part] + column);
      decode(words[0], words[1], codes.x, scales[part]);
      decode(words[2], words[3], codes.y, scales[part]);
    }
  };

  /// Four codes times their scale, which is exact in bf16.
  static __device__ __forceinline__ void decode(std::uint32_t& first, std::uint32_t& second,
                                                std::uint32_t codes, float scale) {
    float2 low, high;
    ptx::from_e4m3(low, high, codes);
    first = Pair<Element>::pack(low.x * scale, low.y * scale);
    second = Pair<Element>::pack(high.x * scale, high.y * scale);
  }

  /// A block of A's columns, which are D's columns `d` and on.
  static __device__ __forceinline__ void run_block(const Params& p, const WarpTile& tile, int block,
                                                   int d, float weight) {
    const portable::ActivateGradParams& rows = p.rows;
    const int parts = rows.act.layout == GateLayout::kNone ? 1 : kParts;
    const std::int64_t row = std::int64_t{tile.row} + tile.lane;
    const bool exists = tile.lane < tile.rows;
    const HiddenRow hidden(p, row, block, exists ? parts : 0);
    const int left = rows.act.width - block * kBlock;
    std::uint32_t most[kParts] = {0, 0};
    float score = 0.0f;
#pragma unroll 1
    for (int c = 0; c < min(left, kBlock); c += kPiece) {
      const int column = block * kBlock + c;
      score += run_piece(p, tile, hidden, c, d + c, column, weight, most);
      if (c % portable::kWarpColumns == 0) continue;
      if (exists) {
        rows.score_parts[row * rows.score_tiles + column / portable::kWarpColumns] = score;
      }
      score = 0.0f;
    }
#pragma unroll 1
    for (int part = 0; part < parts; part++) {
      // Columns that do not exist have codes, too: zeros.
      store_codes(tile, p.dh_codes, {part, block}, part == 0 ? most[0] : most[1], kBlock,
                  [&](std::uint32_t(&words)[kPiece / 2], int piece) {
                    read_words(tile, words, part, d + piece * kPiece, piece * kPiece < left);
                  });
    }
  }

  /// Columns `column` and on of A, which are column `c` and on of the block and D's columns `d` and
  /// on. Returns their part of the score.
  static __device__ __forceinline__ float run_piece(const Params& p, const WarpTile& tile,
                                                    const HiddenRow& hidden, int c, int d,
                                                    int column, float weight,
                                                    std::uint32_t (&most)[kParts]) {
    const bool is_coded = p.h_codes.codes != nullptr;
    portable::GradPiece piece;
    piece.weight = weight;
    __syncwarp();  // all lanes have read the staging buffers
#pragma unroll 1
    for (int chunk = 0; chunk < kPiece / 8; chunk++) {
      tile.load(piece.grad, d + chunk * 8);
      portable::HiddenWords h{};
      hidden.read(h.gate, 0, c + chunk * 8, is_coded);
      hidden.read(h.up, 1, c + chunk * 8, is_coded);
      portable::differentiate<Element>(p.rows.act, h, piece);
      most[0] = larger_of(most[0], h.gate);
      most[1] = larger_of(most[1], h.up);
      tile.store_words(h.gate, h.up, d + chunk * 8);
      Rows::stage_gradients(p.rows.act, tile, chunk, h, piece.a);
    }
    Rows::store_gradients(p.rows, tile, column);
    return piece.score;
  }

  /// dH of 32 columns of D, as words, of gate or of up.
  static __device__ __forceinline__ void read_words(const WarpTile& tile,
                                                    std::uint32_t (&words)[kPiece / 2], int part,
                                                    int d, bool exists) {
    std::uint32_t both[2][kPiece / 2] = {};
    if (exists) {
#pragma unroll
      for (int i = 0; i < 2; i++) tile.load_words(both[i], d + i * kPiece / 2);
    }
#pragma unroll
    for (int i = 0; i < kPiece / 2; i++) {
      const std::uint32_t(&half)[kPiece / 2] = both[i / 8];
      const int at = i % 8 / 4 * 8 + i % 4;
      words[i] = !exists ? 0 : part == 0 ? half[at] : half[at + 4];
    }
  }
};

}  // namespace sonicmoe::cuda::blackwell
