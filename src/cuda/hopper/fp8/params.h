// The arguments of the FP8 kernels. Plain C++: the host fills them, the kernels read them.
#pragma once

#include <climits>

#include "cuda/hopper/fp8/shape.h"
#include "cuda/hopper/params.h"

namespace sonicmoe::cuda {

struct Fp8GatherParams {
  const std::uint8_t* codes;  ///< (T, K); here K is d rounded up to a multiple of 128
  const float* scales;        ///< (T, K / 128)
  const std::int32_t* index;  ///< row of `codes` for row p in expert order
  /// K / 16: the length of a row of codes in units of 16 bytes. Offsets in these units have 32
  /// bits, so they reach 64 GiB of codes; refusal() in layer/checks.cc refuses more.
  std::uint32_t row_units;
  std::int32_t blocks;  ///< K / 128
};

struct Fp8TmaParams {
  CUtensorMap rows;    ///< (word of K, 1, row), box 64 x 1 x 128
  CUtensorMap scales;  ///< (row, 1, block of K), box kFp8ScaleRows x 1 x 1
};

/// Scales of the weights by expert, block of columns and block of K. Strides count elements.
/// Offsets have 31 bits, enough for the scales of 35 TB of codes. A tile has two blocks of columns
/// (units). The first has the tile's first column. The scales of the second lie `unit_stride`
/// elements after the scales of the first.
struct Fp8WeightScales {
  const float* data;
  std::int32_t expert_stride;
  std::int32_t column_stride;
  std::int32_t unit_stride;
  std::int32_t depth_stride;
  std::int32_t column_blocks;  ///< blocks of columns; INT_MAX: the second block always exists
};

/// Where an epilogue stores codes and scales of rows in expert order (fp8::RowsLayout).
struct Fp8RowsOut {
  std::uint8_t* codes;      ///< (C, row_bytes)
  float* scales;            ///< (blocks of a row, scale_rows)
  std::int32_t row_bytes;   ///< number of codes in a row
  std::int32_t scale_rows;  ///< C, rounded up to a multiple of 4
};

/// Where an epilogue stores 16-bit elements of rows in expert order: (C, width) or (C, G, width).
/// Rows begin at multiples of 16 bytes.
struct Fp8ElementsOut {
  std::uint16_t* data;
  std::int64_t row_stride;   ///< elements
  std::int64_t part_stride;  ///< from gate to up, elements
};

/// How forward keeps H for backward: not at all, as codes and scales, or as bf16 elements.
enum class Fp8KeptH : std::int32_t { kNone = 0, kCodes = 1, kElements = 2 };

/// Arguments of the epilogue Fp8Activate.
struct Fp8ActivateParams {
  static constexpr ColumnOrder kColumns = ColumnOrder::kByLane;
  Fp8RowsOut a;
  Fp8RowsOut h;               ///< for kCodes: columns of gate, then of up
  Fp8ElementsOut h_elements;  ///< for kElements
  Fp8ElementsOut a_elements;  ///< A, which low-rank factors read; no data: not stored
  Bias bias[2];               ///< gate, up; without a gate only [0]
  ActivationScalars scalars;
  std::int32_t width;   ///< n
  std::int32_t blocks;  ///< n / 128, rounded up
  Fp8KeptH keep;
};

/// Arguments of the epilogue Fp8ActivateGrad.
struct Fp8ActivateGradParams {
  static constexpr ColumnOrder kColumns = ColumnOrder::kByLane;
  /// The kept H, in boxes of 64 x 1 x 16. For kCodes the coordinates are (16-bit word, gate or up,
  /// row), for kElements (column, gate or up, row). Columns from n on are zeros.
  CUtensorMap h;
  const float* h_scales;    ///< for kCodes: (G blocks, scale_rows)
  Fp8RowsOut dh_codes;      ///< whole blocks: those of gate, then those of up
  Fp8ElementsOut dh;        ///< interleaved: one part of 2n columns
  Fp8ElementsOut a;         ///< A'
  const float* row_weight;  ///< (C); null: 1
  float* score_parts;       ///< (C, score_tiles)
  std::int32_t score_tiles;
  std::int32_t width;        ///< n
  std::int32_t blocks;       ///< n / 128, rounded up
  std::int32_t interleaved;  ///< 1: gate and up are interleaved in dH
  std::uint32_t zero;  ///< always 0, but unknown to the compiler; see Fp8ActivateGrad::kOrdered
  ActivationScalars scalars;
};

/// Arguments of the epilogue Fp8Store.
struct Fp8StoreParams {
  static constexpr ColumnOrder kColumns = ColumnOrder::kAscending;
  RaggedMap out;
  Bias bias;
  const float* row_scale;  ///< null: rows are not scaled
  std::int64_t scale_stride;
  std::int32_t width;
};

template <class ProducerParams, class EpilogueParams>
struct Fp8Params {
  ProducerParams producer;
  OperandBMaps b;
  LowRankParams low_rank;
  RowTilesParams tiles;
  Fp8WeightScales weight_scales;
  EpilogueParams epilogue;
};

using Fp8ActivateGemmParams = Fp8Params<Fp8GatherParams, Fp8ActivateParams>;
using Fp8StoreGemmParams = Fp8Params<Fp8TmaParams, Fp8StoreParams>;
using Fp8ActivateGradGemmParams = Fp8Params<Fp8GatherParams, Fp8ActivateGradParams>;

}  // namespace sonicmoe::cuda
