// Tile records of some tokens' rows, so that products over these rows and over all others can be
// launched apart.
#pragma once

#include <cuda_runtime.h>

#include "cuda/metadata/metadata.h"

namespace sonicmoe::cuda {

/// Of both lists only records, record_count, expert_begin and expert_rows are set. The numbers of
/// rows are those of the whole.
struct RecordSplit {
  Metadata first;  ///< rows of the first tokens
  Metadata rest;   ///< rows of the others
  std::int64_t bytes;
};
/// Lays the arrays out from `base` (which may be null, to learn the size).
RecordSplit record_split(const Problem& problem, void* base);

/// Divides every expert's rows at token `tokens`: within an expert they are in order of tokens.
void split_records(const Device& device, const Problem& problem, const Metadata& whole,
                   std::int64_t tokens, const RecordSplit& split, cudaStream_t stream);

}  // namespace sonicmoe::cuda
