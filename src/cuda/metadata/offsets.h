// Turns the offsets of a grouped GEMM into the lists that products read, clamped to existing rows.
#pragma once

#include <cuda_runtime.h>

#include "cuda/metadata/metadata.h"
#include "sonicmoe/types.h"

namespace sonicmoe::cuda {

/// The offsets and row indices of a call: rows offsets[e] to offsets[e + 1] belong to expert e.
struct OffsetGroups {
  Tensor offsets;            ///< (E + 1) i64
  Tensor gather;             ///< (R) i32 row of `a` for each row of the product, or absent
  std::int64_t rows;         ///< R
  std::int64_t experts;      ///< E
  std::int64_t source_rows;  ///< rows of `a`
};

/// The lists, in the scratch of the call.
struct OffsetLists {
  Metadata groups;      ///< tile records and row ranges; the lists by token are absent
  std::int32_t* index;  ///< (R) `gather`, clamped
  unsigned* counters;   ///< zero after build_offset_lists
  std::int64_t bytes;
};
/// Places the lists from `base` on; a null `base` gives their size only.
OffsetLists offset_lists(void* base, std::int64_t rows, std::int64_t experts);

/// Fills `lists`. The launch that follows may overlap this one (programmatic dependent launch).
void build_offset_lists(const Device& device, const OffsetGroups& groups, const OffsetLists& lists,
                        cudaStream_t stream);

}  // namespace sonicmoe::cuda
