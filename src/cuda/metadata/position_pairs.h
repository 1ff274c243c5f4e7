// Metadata of pairs that are in the order of positions already.
#pragma once

#include <cuda_runtime.h>

#include "cuda/metadata/metadata.h"

namespace sonicmoe::cuda {

/// A list of pairs in the order of positions: a pair's index is its slot and its position.
struct PositionPairs {
  const std::int32_t* expert;  ///< (C) an expert for each pair
  const std::int32_t* token;   ///< (C)
};

/// As build_metadata() for the form pairs, without the launches that find the order by token. An
/// earlier kernel has written metadata.token_offsets; its last entry is the number of pairs.
/// metadata.position_slot is not written; readers of the metadata need it null.
void sort_pairs(const Device& device, const Problem& problem, const PositionPairs& pairs,
                const Metadata& metadata, const MetadataWork& work, cudaStream_t stream);

}  // namespace sonicmoe::cuda
