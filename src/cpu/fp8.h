// Precision::kFp8 on the CPU: quantised tensors are restored to bf16, which holds code * scale
// exactly, and multiplied by the bf16 kernels.
#pragma once

#include "cpu/gemm_kernels.h"
#include "cpu/threads.h"
#include "sonicmoe/moe.h"

namespace sonicmoe::cpu {

/// Where the codes and scales of rows lie: core/fp8_layout.h.
struct CodedRows {
  std::uint8_t* codes = nullptr;
  float* scales = nullptr;
  std::int64_t scale_stride = 0;
};
/// The kept H in its buffer.
CodedRows kept_h_rows(const Problem& problem, const Buffer& h);

/// Quantises the bf16 rows [0, rows) of `source`, whose length is `depth`, in blocks of 128.
struct QuantiseRows {
  Operand source;
  std::int64_t rows = 0;
  std::int64_t depth = 0;
  void* restored = nullptr;    ///< (rows, depth) bf16, may be the source; null: not wanted
  CodedRows coded{};           ///< without codes: not wanted
  std::int64_t coded_row = 0;  ///< the row of `coded` for the first row of the source
};
void quantise_rows(Team& team, const QuantiseRows& job);

/// restored (rows, depth), bf16 = codes times scales.
void restore_rows(Team& team, const CodedRows& coded, std::int64_t rows, std::int64_t depth,
                  void* restored);

/// Elements of the restored weights: up (E, G, n, d), then down (E, d, n).
std::int64_t restored_weights_elements(const Problem& problem);
/// Views of restored weights at `memory`; biases are those of `weights`.
Weights restored_weights(const Problem& problem, const Weights& weights, void* memory);
/// Fills `restored`, which restored_weights() returned.
void restore_weights(Team& team, const Problem& problem, const Buffer& fp8_weights,
                     const Weights& restored);

}  // namespace sonicmoe::cpu
