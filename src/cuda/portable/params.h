// The arguments of the portable kernels. Plain C++: the host fills them, the kernels read them.
#pragma once

#include <cstdint>

#include "cuda/math/bias.h"
#include "cuda/math/layouts.h"
#include "cuda/math/scalars.h"
#include "cuda/metadata/tile_record.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda::portable {

/// Rows of 16-bit elements in memory. Row p is row index[p] of `data`, or row p if index is null.
struct Rows {
  const std::uint8_t* data;
  const std::int32_t* index;
  std::int64_t row_bytes;
};

/// One matrix for each expert; strides in bytes. A line is contiguous: in a K-major matrix it has
/// all k of one column of D, in any other matrix all columns of D for one k.
struct Matrices {
  const std::uint8_t* data;
  std::int64_t expert_bytes;
  std::int64_t line_bytes;
};

/// The tiles of a row product.
struct RowTilesParams {
  const TileRecord* records;
  const std::int32_t* record_count;
  Rows rows;
  /// [0] and [1]: gate and up, or one matrix twice. [2] and [3]: the same for a low-rank term.
  Matrices weights[4];
  std::int32_t columns;       ///< of one matrix
  std::int32_t column_tiles;  ///< tiles along the columns
  std::int32_t column_step;   ///< columns of one matrix in a tile
  /// A CTA's next tile is gridDim.x tiles after its current one: `records_apart` whole records and
  /// `column_tiles_apart` more column tiles.
  std::int32_t records_apart;
  std::int32_t column_tiles_apart;
  /// The column of a matrix at which the second half of a tile begins, minus that of the first
  /// half: half of the tile's columns, or 0 if the second half has the same columns of weights[1]
  /// (gate and up).
  std::int32_t second_half;
  std::int32_t depth;    ///< K of one part
  std::int32_t parts;    ///< 2: K runs through weights[0], then weights[1]
  std::int32_t k_tiles;  ///< of a tile, those of a low-rank term included
  std::int32_t rank;     ///< K of the low-rank term, which comes last; 0: none
  Rows inner;            ///< rows of the low-rank term, in expert order
};

/// How the scale of packed weights is stored.
enum class ScaleKind : std::int32_t {
  kFloat,     ///< fp32
  kExponent,  ///< E8M0
  kNested,    ///< a byte, index of a map of fp32
};

/// Packed weights whose codes have 4 bits; 16 bytes of codes share a scale
/// (producers/packed_line.cuh).
struct PackedCodes {
  const std::uint8_t* codes;
  const void* scales;
  const float* nested_map;
  const float* nested_scales;
  const float* nested_offset;
  float values[16];  ///< of the codes
  /// Which digits of 16 bits of codes are elements 0 and 1, and 2 and 3, as an operand of
  /// ptx::select_bytes().
  std::uint32_t order[2];
  /// 0x32103210. As an argument it is in a register, and an instruction is saved, which can have
  /// one constant only.
  std::uint32_t digits;
  std::uint32_t zero;        ///< 0, which the compiler does not know
  std::int32_t block_shift;  ///< log2 of a block's elements / 32
  ScaleKind scale;
};

/// Where a matrix of weights is in an expert's packed matrix: its line i begins at row
/// row + i * row_step, in column `column`.
struct Fp8View {
  std::int32_t row;
  std::int32_t row_step;
  std::int32_t column;
};

/// Packed weights of e4m3 codes with scales of 128 x 128 elements (producers/fp8_line.cuh).
struct Fp8Codes {
  const std::uint8_t* codes;
  const float* scales;
  std::uint32_t across;         ///< scales of 128 rows
  std::uint32_t expert_scales;  ///< scales of an expert
  Fp8View views[2];             ///< weights[0] and [1]
};

/// The tiles of a row product with packed weights: weights[0] and [1] are codes, and their strides
/// bytes of codes.
struct PackedTilesParams : RowTilesParams {
  PackedCodes codes;
};
struct Fp8TilesParams : RowTilesParams {
  Fp8Codes codes;
};

/// The tiles of a depth product: for each expert, left^T right, summed over its rows.
struct DepthTilesParams {
  const ExpertRecord* longest_first;  ///< null: experts in their own order
  const std::int32_t* expert_begin;
  const std::int32_t* expert_rows;
  Rows left;
  Rows right;
  std::int32_t experts;
  std::int32_t rows;     ///< of D: the width of left
  std::int32_t columns;  ///< of D: the width of right
  std::int32_t row_tiles;
  std::int32_t column_tiles;
  /// A CTA's next tile is gridDim.x tiles after its current one: `experts_apart` whole experts and
  /// `tiles_apart` more tiles.
  std::int32_t experts_apart;
  std::int32_t tiles_apart;
};

// Epilogues.

/// Rows of 16-bit results, addressed by row in expert order.
struct RowsOut {
  std::uint8_t* data;
  std::int64_t row_bytes;
};

struct StoreParams {
  RowsOut out;
  Bias bias;
  const float* row_scale;  ///< null: 1
  std::int64_t scale_stride;
  float factor;  ///< of every row, besides row_scale
  std::int32_t columns;
};

/// The activation of a call.
struct Activating {
  ActivationScalars scalars;
  ActivationKind kind;
  GateLayout layout;
  std::int32_t width;  ///< n
};

struct ActivateParams {
  RowsOut h;  ///< data is null at inference
  RowsOut a;
  Bias bias[2];  ///< gate, up; without a gate only [0]
  Activating act;
};

struct ActivateGradParams {
  const std::uint8_t* h;
  std::int64_t h_row_bytes;  ///< of H and dH
  std::uint8_t* dh;
  RowsOut a;
  const float* row_weight;
  float* score_parts;
  std::int32_t score_tiles;
  Activating act;
};

/// How D is divided between two outputs: along its rows or its columns, as halves or alternating.
enum class GradSplit : std::int32_t {
  kNone,
  kColumnHalves,
  kRowHalves,
  kColumnsAlternate,
  kRowsAlternate,
};

/// Matrices (expert, row, column); strides in elements.
struct GradOut {
  void* data;
  std::int64_t expert_stride;
  std::int64_t row_stride;
  std::int64_t column_stride;
};

struct StoreExpertParams {
  GradOut out[2];
  GradStore store;
  GradSplit split;
  std::int32_t border;   ///< if split in halves: the first row or column of out[1]
  std::int32_t columns;  ///< of D
  /// For fp32: whether 4 neighbouring elements of a row may be accessed at once.
  std::int32_t vectors;
};

template <class TilesParams, class EpilogueParams>
struct ProductParams {
  TilesParams tiles;
  EpilogueParams epilogue;
};

}  // namespace sonicmoe::cuda::portable
