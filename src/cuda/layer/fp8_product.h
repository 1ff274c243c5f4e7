// Products and quantisers of Precision::kFp8, described as those of product.h are.
#pragma once

#include <cstdint>
#include <variant>

#include "cuda/layer/product.h"

namespace sonicmoe::cuda {

/// Rows of e4m3 codes (rows, depth), and their scales by row and block of 128 of the depth.
struct Fp8Rows {
  std::uint8_t* codes;
  float* scales;
  std::int64_t rows;
  std::int64_t depth;
  /// Scales of a block of the depth lie this far apart, those of a row next to each other:
  /// (depth/128, scale_stride). 0: those of a row are together, (rows, depth/128).
  std::int64_t scale_stride;
};

/// One matrix (columns, depth) of codes for each expert; strides of the scales in elements.
struct Fp8Matrices {
  const std::uint8_t* codes;
  const float* scales;
  std::int64_t experts;
  std::int64_t columns;
  std::int64_t depth;
  std::int64_t parts;          ///< matrices of an expert: gate and up; `columns` are those of one
  std::int64_t expert_scales;  ///< from an expert's scales to the next one's
  std::int64_t column_scales;  ///< from a block of 128 columns to the next one
  std::int64_t depth_scales;   ///< from a block of 128 of the depth to the next one
};

/// codes and scales of the rows of a 16-bit matrix (rows, depth).
struct QuantizeRows {
  Tensor rows;
  Fp8Rows out;  ///< scale_stride 0
};

/// As Activate; A in codes, H in codes or bf16 or not kept. Both absent: not kept.
struct Fp8Activate {
  Fp8Rows a;
  Fp8Rows h_codes;  ///< (C, G n), gate's columns first; codes null: none
  Tensor h;         ///< (C, G, n) or absent
  Tensor bias_gate;
  Tensor bias_up;
  Activation activation;
};

/// As ActivateGrad; dH in codes too. H is in codes or in bf16.
struct Fp8ActivateGrad {
  Fp8Rows h_codes;
  Tensor h;
  Fp8Rows dh_codes;
  Tensor dh;  ///< as GateLayout says
  Tensor a;
  const float* row_weight;
  float* score_parts;
  std::int32_t score_tiles;
  Activation activation;
  GateLayout layout;  ///< of dh
};

/// D[p] = rows[index[p]] * W[e]^T for the rows p of every expert e, in codes: each 128 of the depth
/// multiplied by both scales and summed in fp32.
struct Fp8RowProduct {
  RowGroups groups;
  Fp8Rows rows;               ///< gathered rows have scale_stride 0, others not
  const std::int32_t* index;  ///< null: row p
  Fp8Matrices weights;
  std::variant<StoreOutput, Fp8Activate, Fp8ActivateGrad> epilogue;
  unsigned* tile_counter;  ///< of the dynamic tile scheduler; zero before the launch
};

}  // namespace sonicmoe::cuda
