// Routing metadata: the list of rows of each expert, and the list of rows of each token. Rows are
// sorted by (expert, token, slot), where a slot is one of the choices of a token: a column of ids,
// or a pair. Ids, pairs and grouped rows all become this form.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sonicmoe/moe.h"

namespace sonicmoe::cpu {

/// Arrays in the caller's `saved` buffer. The source of a row is the index of its routing weight:
/// t * K + k for ids, the pair, or the grouped row. src/cuda calls it the row's slot.
struct Metadata {
  std::int64_t* offsets = nullptr;     ///< (E+1): rows of expert e are [offsets[e], offsets[e+1])
  std::int32_t* row_token = nullptr;   ///< (C): the row of x
  std::int32_t* row_source = nullptr;  ///< (C)
  std::int32_t* token_offsets = nullptr;  ///< (T+1)
  std::int32_t* token_rows = nullptr;     ///< (C): rows of token t, in slot order

  std::span<const std::int64_t> expert_offsets(const Problem& problem) const {
    return {offsets, static_cast<std::size_t>(problem.experts) + 1};
  }
};

std::int64_t metadata_bytes(const Problem& problem);
Metadata metadata_at(const Problem& problem, void* base);
/// The number of rows that build_metadata() will find; an upper bound if grouped rows overlap.
/// Writes nothing.
std::int64_t count_rows(const Problem& problem, const Routing& routing);
void build_metadata(const Problem& problem, const Routing& routing, const Metadata& metadata);

/// Throws unless every index of the metadata is inside of its list, as in every metadata of
/// build_metadata(). Backward would read and write other memory by an index from other bytes.
void check_metadata(const Problem& problem, const Metadata& metadata);

/// The routing weight of a source; 1 if grouped rows have no weights.
double source_weight(const Problem& problem, const Tensor& weights, std::int64_t source);

}  // namespace sonicmoe::cpu
