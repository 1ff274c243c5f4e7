// Precision::kFp8 on the CPU: operands are quantised, then dequantised ("restored") to bf16, and
// the bf16 kernels multiply the restored operands. code * scale is exact in bf16
// (core/fp8_quantize.h).
#pragma once

#include "cpu/gemm_kernels.h"
#include "cpu/threads.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::cpu {

/// Codes and scales of rows, laid out as fp8::RowsLayout (core/fp8_layout.h).
struct CodedRows {
  std::uint8_t* codes = nullptr;
  float* scales = nullptr;
  std::int64_t scale_stride = 0;
};
/// The codes and scales of the kept H in its buffer `h`.
CodedRows kept_h_rows(const Problem& problem, const Buffer& h);

/// Quantises the rows [0, rows) of `source`, each of `parts` parts of `width` bf16 values. A part
/// has blocks of 128, the last of which may have fewer. Writes the restored values to `restored`,
/// the codes and scales to `coded`, or both.
struct QuantiseRows {
  Operand source;
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::int64_t parts = 1;
  void* restored = nullptr;    ///< code * scale, (rows, parts * width) bf16; may be the memory of
                               ///< `source`; null: not written
  CodedRows coded{};           ///< codes and scales; not written if `codes` is null
  std::int64_t coded_row = 0;  ///< row 0 of `source` goes to this row of `coded`
};
void quantise_rows(Team& team, const QuantiseRows& job);

/// Writes code * scale of every element of `coded` to `restored`, (rows, parts * width) bf16.
void restore_rows(Team& team, const CodedRows& coded, std::int64_t rows, std::int64_t parts,
                  std::int64_t width, void* restored);

/// Number of elements of the restored weights: gate and up (E, G, n, d), then down (E, d, n).
std::int64_t restored_weights_elements(const Problem& problem);
/// Views of restored weights at `memory`, and the biases of `weights`. Fills nothing.
Weights restored_weights(const Problem& problem, const Weights& weights, void* memory);
/// Dequantises `fp8_weights` into `restored`, the views that restored_weights() returned.
void restore_weights(Team& team, const Problem& problem, const Buffer& fp8_weights,
                     const Weights& restored);

}  // namespace sonicmoe::cpu
