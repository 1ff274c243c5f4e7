// Tile records in two lists, so that products over the rows of some tokens can be launched before
// the rows of the others are there.
#pragma once

#include <cuda_runtime.h>

#include "cuda/metadata/metadata.h"

namespace sonicmoe::cuda {

/// Of both lists only records, record_count, expert_begin and expert_rows are set. The numbers of
/// rows are those of the whole.
struct RecordSplit {
  Metadata first;  ///< full records whose rows all belong to the first tokens
  Metadata rest;   ///< all other rows
  std::int64_t bytes;
};
/// Lays the arrays out from `base` (which may be null, to learn the size).
RecordSplit record_split(const Problem& problem, void* base);

/// The first tokens are those below `tokens`. Within an expert, rows are in order of tokens.
void split_records(const Device& device, const Problem& problem, const Metadata& whole,
                   std::int64_t tokens, const RecordSplit& split, cudaStream_t stream);

}  // namespace sonicmoe::cuda
