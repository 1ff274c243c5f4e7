// Divides the tile records into two lists, so that products over the rows of the first tokens can
// be launched before the rows of the other tokens have arrived.
#pragma once

#include <cuda_runtime.h>

#include "cuda/metadata/metadata.h"

namespace sonicmoe::cuda {

/// Both lists have only records, record_count, expert_begin and expert_rows. Rows have the same
/// numbers as in the undivided list.
struct RecordSplit {
  Metadata first;  ///< full records whose rows all belong to the first tokens
  Metadata rest;   ///< all other rows
  std::int64_t bytes;
};
/// Places the arrays from `base` on; a null `base` gives their size only.
RecordSplit record_split(const Problem& problem, void* base);

/// The first tokens are those with numbers below `tokens`. Within an expert, rows are in token
/// order.
void split_records(const Device& device, const Problem& problem, const Metadata& whole,
                   std::int64_t tokens, const RecordSplit& split, cudaStream_t stream);

}  // namespace sonicmoe::cuda
