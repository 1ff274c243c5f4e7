// Divides the tile records into lists, so that products over the rows of some ranks can be launched
// before the rows of the other ranks have arrived.
#pragma once

#include <cuda_runtime.h>

#include "cuda/metadata/metadata.h"

namespace sonicmoe::cuda {

/// The most groups of sources.
inline constexpr int kMostSourceGroups = 4;

/// Group g has the sources [bounds[g], bounds[g + 1]); the groups begin at source 1 and end at the
/// last source.
struct SourceGroups {
  int groups = 0;
  std::int32_t bounds[kMostSourceGroups + 1] = {};
};

/// The lists have only records, record_count, expert_begin and expert_rows. Rows have the same
/// numbers as in the undivided list. The lists `arrivals` with `own`, `sums` with `own`, and
/// `by_source` (with `own`, if first_source is 1) each have the rows of the undivided list. Within
/// an expert, rows are in token order.
struct RecordSplit {
  Metadata own;  ///< full records whose rows all belong to source 0
  /// Only `records` and `record_count`: those of `own` (not if first_source is 1), then those that
  /// need no rows of the sources after source 1, then source 2, ...
  Metadata by_source;
  /// [g]: records that need no rows of the sources after group g, and that are in no earlier list.
  /// So with `own` and the lists `arrivals` 0 to g every row of the sources before group g is
  /// computed.
  Metadata arrivals[kMostSourceGroups];
  /// [g]: records with rows of the sources up to group g, and that are in no earlier list. So with
  /// the lists `sums` 0 to g every row of these sources is computed, except those in `own`.
  Metadata sums[kMostSourceGroups];
  std::int64_t bytes;
};
/// Places the arrays from `base` on; a null `base` gives their size only.
RecordSplit record_split(const Problem& problem, void* base);

/// What split_records() writes besides `own`. Source s has the tokens [s * tokens, (s + 1) *
/// tokens).
struct SplitLists {
  std::int64_t tokens;
  SourceGroups arrivals;
  SourceGroups sums;
  std::int32_t by_source = 0;     ///< the number of sources; 0: without `by_source`
  std::int32_t first_source = 0;  ///< of `by_source`, 0 or 1
};
/// Whether `by_source` can be written.
bool splits_by_source(std::int64_t experts, std::int32_t sources);
void split_records(const Device& device, const Problem& problem, const Metadata& whole,
                   const SplitLists& lists, const RecordSplit& split, cudaStream_t stream);

}  // namespace sonicmoe::cuda
