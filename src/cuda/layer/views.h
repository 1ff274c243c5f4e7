// Views of weights, H and gradients as operands of products.
#pragma once

#include "cuda/layer/product.h"

namespace sonicmoe::cuda {

/// Whether gate and up alternate along n: up begins one element after gate, both have a stride
/// of 2. A tensor map cannot describe one of them alone, because its innermost stride is always 1.
bool is_interleaved(const Tensor& gate, const Tensor& up);

/// (E, 2n, d): alternating rows of gate and up, from the `gate` of interleaved weights.
Tensor interleaved_rows(const Tensor& gate);

/// (E, a, b) as (E, b, a): the operand of a product over the other dimension.
Tensor transposed(const Tensor& matrices);

GateLayout gate_layout(const Problem& problem, const Weights& weights);

/// H or dH at `data`: (C, 2, n), (C, 2n) or (C, 1, n), as gate_layout() says.
Tensor h_rows(const Problem& problem, const Weights& weights, void* data);

/// gate and up as the operand of A: (E, n, d) twice, or (E, 2n, d).
WeightOperand up_operand(const Problem& problem, const Weights& weights);

/// gate and up as the operand of dX~ = dH W1, whose sum runs over n.
WeightOperand up_operand_transposed(const Problem& problem, const Weights& weights);

}  // namespace sonicmoe::cuda
