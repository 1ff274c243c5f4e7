// The arguments of the epilogues of products of codes (Precision::kFp8). Plain C++.
#pragma once

#include "cuda/blackwell/params.h"
#include "cuda/portable/params.h"

namespace sonicmoe::cuda::blackwell {

/// Codes and scales of rows in expert order. A row may have two parts, gate and up.
struct RowCodes {
  std::uint8_t* codes;        ///< null: none
  float* scales;              ///< (parts * part_blocks, block_stride)
  std::int64_t row_bytes;     ///< number of codes in a row
  std::int64_t block_stride;  ///< from a block's scales of all rows to the next block's
  std::int32_t part_bytes;    ///< codes of a part
  std::int32_t part_blocks;   ///< blocks of a part
};

struct CodesActivateParams {
  RowCodes a;
  RowCodes h;                    ///< absent at inference, or if H is kept in bf16
  portable::RowsOut h_elements;  ///< (C, G n): H in bf16, or absent
  Bias bias[2];                  ///< gate, up; without a gate only [0]
  portable::Activating act;
};

struct CodesActivateGradParams {
  /// `h` has the H that is kept in bf16, the n of gate before those of up, if `h_codes` is absent.
  portable::ActivateGradParams rows;
  RowCodes h_codes;
  RowCodes dh_codes;  ///< whole blocks
};

}  // namespace sonicmoe::cuda::blackwell
