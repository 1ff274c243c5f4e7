// Views of weights, H and gradients as operands of products.
#pragma once

#include "cuda/device/carver.h"
#include "cuda/layer/product.h"

namespace sonicmoe::cuda {

/// Whether gate and up alternate along n: up begins one element after gate, both have a stride
/// of 2. A tensor map cannot describe one of them alone, because its innermost stride is always 1.
bool is_interleaved(const Tensor& gate, const Tensor& up);

/// (E, 2n, d): alternating rows of gate and up, from the `gate` of interleaved weights.
Tensor interleaved_rows(const Tensor& gate);

/// (E, a, b) as (E, b, a): the operand of a product over the other dimension.
Tensor transposed(const Tensor& matrices);

/// The layout of gate and up in the weights, and in dH.
GateLayout gate_layout(const Problem& problem, const Weights& weights);
/// The layout of gate and up in H. Kept for fp8, H never alternates.
GateLayout h_layout(const Problem& problem, const Weights& weights);

/// H and dH as elements at `data`: (C, 2, n), (C, 2n) or (C, 1, n), by their layouts.
Tensor h_rows(const Problem& problem, const Weights& weights, void* data);
Tensor dh_rows(const Problem& problem, const Weights& weights, void* data);

/// The buffer H, in which forward keeps elements or, if fp8::keeps_codes(), codes and scales.
std::int64_t h_bytes(const Problem& problem);
/// The rows in the buffer H; none if it is null (inference).
StoredRows kept_h(const Problem& problem, const Weights& weights, void* buffer);

/// Takes memory for quantised rows: in token order, to be gathered, with `width` rounded up to
/// whole blocks, or in expert order, laid out as fp8::RowsLayout.
CodedRows take_token_codes(Carver<256>& carver, std::int64_t rows, std::int64_t width);
CodedRows take_row_codes(Carver<256>& carver, std::int64_t rows, std::int64_t depth);

/// Quantised rows as an operand.
inline RowOperand operand_of(const CodedRows& rows, const std::int32_t* index) {
  return {rows.codes, index, rows.scales};
}

/// gate and up as the operand of A: (E, n, d) twice, or (E, 2n, d).
WeightOperand up_operand(const Problem& problem, const Weights& weights);

/// gate and up as the operand of dX~ = dH W1, whose sum runs over n.
WeightOperand up_operand_transposed(const Problem& problem, const Weights& weights);

/// The weights of a pass as operands of its products: views of the caller's weights, or with
/// Precision::kFp8 the matrices in the buffer `fp8_weights` (fp8::WeightsLayout).
class WeightOperands {
 public:
  WeightOperands(const Problem& problem, const Weights& weights, const Buffer& fp8_weights)
      : problem_(problem), weights_(weights), codes_(fp8_weights) {}
  WeightOperand up() const;               ///< of A
  WeightOperand down() const;             ///< of Y
  WeightOperand down_transposed() const;  ///< of dH
  WeightOperand up_transposed() const;    ///< of dX~: K runs over the n of gate, then of up

 private:
  bool coded() const { return problem_.precision == Precision::kFp8; }

  const Problem& problem_;
  const Weights& weights_;
  const Buffer& codes_;
};

}  // namespace sonicmoe::cuda
