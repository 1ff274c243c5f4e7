// Divides the tile records into lists, so that products over the rows of some ranks can be launched
// before the rows of the other ranks have arrived.
#pragma once

#include <cuda_runtime.h>

#include "cuda/metadata/metadata.h"

namespace sonicmoe::cuda {

/// The most groups of sources.
inline constexpr int kMostSourceGroups = 4;

/// How tokens are divided among sources: source s has the tokens [s * tokens, (s + 1) * tokens).
/// Group g has the sources [bounds[g], bounds[g + 1]); the groups begin at source 1 and end at the
/// last source.
struct SourceGroups {
  std::int64_t tokens;
  int groups;
  std::int32_t bounds[kMostSourceGroups + 1];
};

/// The lists have only records, record_count, expert_begin and expert_rows. Rows have the same
/// numbers as in the undivided list, and each list of `arrivals` and `sums` together with `own` has
/// each row once, in the records of the undivided list. Within an expert, rows are in token order.
struct RecordSplit {
  Metadata own;  ///< full records whose rows all belong to source 0
  /// [g]: records that need no rows of the sources after group g, and that are in no earlier list.
  Metadata arrivals[kMostSourceGroups];
  /// [g]: records with rows of the sources up to group g, and that are in no earlier list. So with
  /// the lists `sums` 0 to g every row of these sources is computed, except those in `own`.
  Metadata sums[kMostSourceGroups];
  std::int64_t bytes;
};
/// Places the arrays from `base` on; a null `base` gives their size only.
RecordSplit record_split(const Problem& problem, void* base);

/// Writes `own` and the lists of each group of `arrivals` and of `sums`.
void split_records(const Device& device, const Problem& problem, const Metadata& whole,
                   const SourceGroups& arrivals, const SourceGroups& sums, const RecordSplit& split,
                   cudaStream_t stream);

}  // namespace sonicmoe::cuda
