// A part of a case's tokens as a batch of its own.
#pragma once

#include "verify/inputs.h"

namespace sonicmoe::verify {

struct BatchPart {
  Problem problem;
  /// Rows of x, dout, out and dx are views of the whole batch's rows, and so are ids and their
  /// weights. A list of pairs and the ranges of grouped rows are copies without the other tokens.
  /// Weights and their gradients are those of the whole batch.
  Tensors tensors;
  /// For each row of dweights (for pairs: each entry), its row in the whole batch.
  std::vector<std::int64_t> dweights_rows;
};

/// The tokens `range` of the case. The copies are blocks of their own.
BatchPart part_of(const Case& c, const Tensors& whole, const TokenRange& range, Blocks& blocks);

/// The bytes of the elements of row `row`, without the gaps between them.
std::vector<std::uint8_t> row_bytes(const BlockView& tensor, std::int64_t row);

}  // namespace sonicmoe::verify
