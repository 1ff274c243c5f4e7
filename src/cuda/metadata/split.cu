#include "cuda/device/carver.h"
#include "cuda/device/launch.h"
#include "cuda/metadata/records.cuh"
#include "cuda/metadata/split.h"

namespace sonicmoe::cuda {
namespace {

/// The number of rows of expert e with tokens below `tokens`.
__device__ int rows_below(const Metadata& whole, int e, std::int64_t tokens) {
  const int begin = whole.expert_begin[e];
  int low = begin;
  for (int high = begin + whole.expert_rows[e]; low < high;) {
    const int middle = low + (high - low) / 2;
    if (whole.row_token[middle] < tokens) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - begin;
}

enum class Rounding { kDown, kUp };

/// The end of the records of the sources below `source`, in rows of expert e. A record with rows of
/// more sources counts (kUp) or does not (kDown).
__device__ int end_of(const Metadata& whole, int e, std::int64_t tokens, int source,
                      Rounding rounding) {
  const int rows = rows_below(whole, e, tokens * source);
  const int full = rows / kRecordRows * kRecordRows;
  return rounding == Rounding::kDown || full == rows
             ? full
             : min(full + kRecordRows, whole.expert_rows[e]);
}

/// The rows of expert e in a list of group `group`.
__device__ RowRange range_of(const Metadata& whole, int e, std::int64_t tokens,
                             const SourceGroups& of, int group, Rounding rounding) {
  const Rounding first = group == 0 ? Rounding::kDown : rounding;
  const int begin = end_of(whole, e, tokens, of.bounds[group], first);
  const int end = group + 1 == of.groups ? whole.expert_rows[e]
                                         : end_of(whole, e, tokens, of.bounds[group + 1], rounding);
  return {whole.expert_begin[e] + begin, end - begin};
}

/// Blocks with blockIdx.y = 0 write `own`, the next ones `arrivals`, then `sums`, then `by_source`.
__global__ void __launch_bounds__(kMetadataThreads)
    split_records_kernel(const __grid_constant__ Metadata whole,
                         const __grid_constant__ SplitLists lists, int experts,
                         const __grid_constant__ RecordSplit split) {
  const int arrival = static_cast<int>(blockIdx.y) - 1;
  const int sum = arrival - lists.arrivals.groups;
  const std::int64_t tokens = lists.tokens;
  if (sum == lists.sums.groups) {
    const int last = lists.by_source - 1;
    take_ranges(
        split.by_source, experts * lists.by_source, {nullptr, 0},
        [&](int entry) {
          const int source = entry / experts, e = entry - source * experts;
          const int begin = source == 0 ? 0 : end_of(whole, e, tokens, source, Rounding::kDown);
          const int end = source == last ? whole.expert_rows[e]
                                         : end_of(whole, e, tokens, source + 1, Rounding::kDown);
          return RowRange{whole.expert_begin[e] + begin, end - begin};
        },
        ByList{experts});
    return;
  }
  const Metadata& out = arrival < 0 ? split.own
                        : sum >= 0  ? split.sums[sum]
                                    : split.arrivals[arrival];
  take_ranges(out, experts, {nullptr, 0}, [&](int e) {
    if (arrival < 0) {
      return RowRange{whole.expert_begin[e], end_of(whole, e, tokens, 1, Rounding::kDown)};
    }
    return sum >= 0 ? range_of(whole, e, tokens, lists.sums, sum, Rounding::kUp)
                    : range_of(whole, e, tokens, lists.arrivals, arrival, Rounding::kDown);
  });
}

}  // namespace

RecordSplit record_split(const Problem& problem, void* base) {
  Carver<256> carver(base);
  RecordSplit split{};
  const auto place = [&](Metadata& list) {
    list.most_records =
        static_cast<std::int32_t>(row_capacity(problem) / kRecordRows + problem.experts);
    list.records = carver.take<TileRecord>(list.most_records);
    list.record_count = carver.take<std::int32_t>(1);
    list.expert_begin = carver.take<std::int32_t>(problem.experts);
    list.expert_rows = carver.take<std::int32_t>(problem.experts);
  };
  place(split.own);
  place(split.by_source);
  for (Metadata& list : split.arrivals) place(list);
  for (Metadata& list : split.sums) place(list);
  split.bytes = carver.used();
  return split;
}

bool splits_by_source(std::int64_t experts, std::int32_t sources) {
  return experts * sources <= kMaxMetadataExperts;
}

void split_records(const Device& device, const Problem& problem, const Metadata& whole,
                   const SplitLists& lists, const RecordSplit& split, cudaStream_t stream) {
  constexpr unsigned kBlocks = 2;
  const auto count = static_cast<unsigned>(1 + lists.arrivals.groups + lists.sums.groups +
                                           (lists.by_source != 0 ? 1 : 0));
  launch_dependent(device, "launching the split of tile records", split_records_kernel,
                   {dim3(kBlocks, count), kMetadataThreads}, stream, whole, lists,
                   static_cast<int>(problem.experts), split);
}

}  // namespace sonicmoe::cuda
