#include "cuda/device/carver.h"
#include "cuda/device/launch.h"
#include "cuda/metadata/records.cuh"
#include "cuda/metadata/split.h"

namespace sonicmoe::cuda {
namespace {

/// below[i] = the number of rows of expert e with tokens below limits[i]. The searches overlap.
template <int kCount>
__device__ void count_below(const Metadata& whole, int e, const std::int64_t (&limits)[kCount],
                            int (&below)[kCount]) {
  const int begin = whole.expert_begin[e];
  const int rows = whole.expert_rows[e];
  int high[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    below[i] = 0;
    high[i] = rows;
  }
  for (int left = rows; left > 0; left /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const int middle = below[i] + (high[i] - below[i]) / 2;
      if (below[i] == high[i]) continue;
      if (whole.row_token[begin + middle] < limits[i]) {
        below[i] = middle + 1;
      } else {
        high[i] = middle;
      }
    }
  }
}

/// `rows` without the rows of a record that is not full, or with all rows of this record.
__device__ int rounded_down(int rows) { return rows / kRecordRows * kRecordRows; }
__device__ int rounded_up(int rows, int most) {
  return min(rounded_down(rows + kRecordRows - 1), most);
}

/// The rows of expert e in list `group` of RecordSplit::arrivals.
__device__ RowRange arrivals_of(const Metadata& whole, int e, std::int64_t tokens,
                                const SourceGroups& of, int group) {
  const std::int64_t limits[] = {of.bounds[max(group - 1, 0)] * tokens, of.bounds[group] * tokens,
                                 of.bounds[group + 1] * tokens};
  int below[3];
  count_below(whole, e, limits, below);
  // A record that needs rows of a later group is cut behind its rows of the earlier groups.
  const int begin = group == 0 ? rounded_down(below[1]) : max(rounded_down(below[1]), below[0]);
  const int end =
      group + 1 == of.groups ? whole.expert_rows[e] : max(rounded_down(below[2]), below[1]);
  return {whole.expert_begin[e] + begin, end - begin};
}

/// The rows of expert e in list `group` of RecordSplit::sums.
__device__ RowRange sums_of(const Metadata& whole, int e, std::int64_t tokens,
                            const SourceGroups& of, int group) {
  const std::int64_t limits[] = {of.bounds[group] * tokens, of.bounds[group + 1] * tokens};
  int below[2];
  count_below(whole, e, limits, below);
  const int rows = whole.expert_rows[e];
  const int begin = group == 0 ? rounded_down(below[0]) : rounded_up(below[0], rows);
  const int end = group + 1 == of.groups ? rows : rounded_up(below[1], rows);
  return {whole.expert_begin[e] + begin, end - begin};
}

/// The rows of expert e in the full records that need rows of `source` and of no later source.
__device__ RowRange source_of(const Metadata& whole, int e, std::int64_t tokens, int source) {
  const std::int64_t limits[] = {source * tokens, (source + 1) * tokens};
  int below[2];
  count_below(whole, e, limits, below);
  const int begin = rounded_down(below[0]);
  return {whole.expert_begin[e] + begin, rounded_down(below[1]) - begin};
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
    take_ranges(
        split.by_source, experts * (lists.by_source - lists.first_source), {nullptr, 0},
        [&](int entry) {
          const int list = entry / experts, e = entry - list * experts;
          const int source = lists.first_source + list;
          RowRange range = source_of(whole, e, tokens, source);
          const int end = whole.expert_begin[e] + whole.expert_rows[e];
          if (source + 1 == lists.by_source) range.rows = end - range.begin;
          return range;
        },
        ByList{experts});
    return;
  }
  const Metadata& out = arrival < 0 ? split.own
                        : sum >= 0  ? split.sums[sum]
                                    : split.arrivals[arrival];
  take_ranges(out, experts, {nullptr, 0}, [&](int e) {
    if (arrival < 0) return source_of(whole, e, tokens, 0);
    return sum >= 0 ? sums_of(whole, e, tokens, lists.sums, sum)
                    : arrivals_of(whole, e, tokens, lists.arrivals, arrival);
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
