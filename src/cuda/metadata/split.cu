#include "cuda/device/carver.h"
#include "cuda/device/launch.h"
#include "cuda/metadata/records.cuh"
#include "cuda/metadata/split.h"

namespace sonicmoe::cuda {
namespace {

/// The row of an expert at which the second list begins. The first list takes the full records
/// whose tokens are all below `tokens`, so both lists together have as many records as the
/// undivided one.
__device__ int split_row(const Metadata& whole, int e, std::int32_t tokens) {
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
  return begin + (low - begin) / kRecordRows * kRecordRows;
}

/// Blocks with blockIdx.y = 0 write the first list, those with 1 the second.
__global__ void __launch_bounds__(kMetadataThreads)
    split_records_kernel(const Metadata whole, std::int32_t tokens, int experts,
                         const RecordSplit split) {
  const bool rest = blockIdx.y != 0;
  take_ranges(rest ? split.rest : split.first, experts, {nullptr, 0}, [&](int e) {
    const int begin = whole.expert_begin[e];
    const int middle = split_row(whole, e, tokens);
    return rest ? RowRange{middle, begin + whole.expert_rows[e] - middle}
                : RowRange{begin, middle - begin};
  });
}

}  // namespace

RecordSplit record_split(const Problem& problem, void* base) {
  Carver<256> carver(base);
  RecordSplit split{};
  for (Metadata* list : {&split.first, &split.rest}) {
    list->most_records =
        static_cast<std::int32_t>(row_capacity(problem) / kRecordRows + problem.experts);
    list->records = carver.take<TileRecord>(list->most_records);
    list->record_count = carver.take<std::int32_t>(1);
    list->expert_begin = carver.take<std::int32_t>(problem.experts);
    list->expert_rows = carver.take<std::int32_t>(problem.experts);
  }
  split.bytes = carver.used();
  return split;
}

void split_records(const Device& device, const Problem& problem, const Metadata& whole,
                   std::int64_t tokens, const RecordSplit& split, cudaStream_t stream) {
  constexpr unsigned kBlocks = 2;
  launch_dependent(device, "launching the split of tile records", split_records_kernel,
                   {dim3(kBlocks, 2), kMetadataThreads}, stream, whole,
                   static_cast<std::int32_t>(tokens), static_cast<int>(problem.experts), split);
}

}  // namespace sonicmoe::cuda
