// Products and quantisers of Precision::kFp8, described without tiles or kernels as in product.h.
#pragma once

#include <cstdint>
#include <variant>

#include "cuda/layer/product.h"

namespace sonicmoe::cuda {

/// Quantised rows: e4m3 codes (rows, depth), and one scale for each row and each block of 128 along
/// the depth.
struct Fp8Rows {
  std::uint8_t* codes;
  float* scales;
  std::int64_t rows;
  std::int64_t depth;
  /// 0: scales are (rows, depth/128). Otherwise they are (depth/128, scale_stride): the scales of
  /// consecutive rows are contiguous, and the next block's lie scale_stride elements further.
  std::int64_t scale_stride;
};

/// One or two matrices (columns, depth) of codes for each expert, and their scales. Strides count
/// elements.
struct Fp8Matrices {
  const std::uint8_t* codes;
  const float* scales;
  std::int64_t experts;
  std::int64_t columns;
  std::int64_t depth;
  std::int64_t parts;          ///< matrices of an expert: 2 for gate and up, else 1
  std::int64_t expert_scales;  ///< stride of the scales from one expert to the next
  std::int64_t column_scales;  ///< stride of the scales from one block of 128 columns to the next
  std::int64_t depth_scales;   ///< stride of the scales from one block of 128 along K to the next
};

/// out = codes and scales of `rows`, a 16-bit matrix (rows, depth).
struct QuantizeRows {
  Tensor rows;
  Fp8Rows out;  ///< scale_stride must be 0
};

/// As Activate, but A is written as codes, and H as codes, in bf16, or, at inference, not at all.
struct Fp8Activate {
  Fp8Rows a;
  Fp8Rows h_codes;  ///< (C, G n), gate's n columns first; not written if `codes` is null
  Tensor h;         ///< (C, G, n) bf16; not written if absent
  Tensor bias_gate;
  Tensor bias_up;
  Activation activation;
};

/// As ActivateGrad, but dH is written twice: in bf16 (dh) and as codes (dh_codes). H is read from
/// h_codes or, if the codes there are null, from h.
struct Fp8ActivateGrad {
  Fp8Rows h_codes;
  Tensor h;
  Fp8Rows dh_codes;
  Tensor dh;  ///< in the layout `layout`
  Tensor a;
  const float* row_weight;
  float* score_parts;
  std::int32_t score_tiles;
  Activation activation;
  GateLayout layout;  ///< of dh
};

/// D[p] = rows[index[p]] * W[e]^T for the rows p of every expert e, from quantised operands. For
/// each block of 128 along the depth, the product of the codes is multiplied by the scales of the
/// row and of the weights and added to an fp32 sum.
struct Fp8RowProduct {
  RowGroups groups;
  Fp8Rows rows;               ///< scale_stride is 0 if and only if `index` is given
  const std::int32_t* index;  ///< null: row p of D comes from row p of `rows`
  Fp8Matrices weights;
  std::variant<StoreOutput, Fp8Activate, Fp8ActivateGrad> epilogue;
  unsigned* tile_counter;  ///< of the dynamic tile scheduler; zero before the launch
};

}  // namespace sonicmoe::cuda
