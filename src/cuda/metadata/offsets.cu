#include <cstddef>

#include "cuda/device/carver.h"
#include "cuda/device/launch.h"
#include "cuda/metadata/offsets.h"
#include "cuda/metadata/records.cuh"

namespace sonicmoe::cuda {
namespace {

constexpr int kIndexBlocks = 64;
constexpr int kOffsetCounters = 64;

/// OffsetGroups as arguments of the kernel.
struct OffsetArgs {
  const std::int64_t* offsets;
  const std::int32_t* gather;  // null: none
  std::int64_t offset_stride;
  std::int64_t gather_stride;
  std::int64_t rows;  // 0 if `a` has no rows to gather
  std::int64_t source_rows;
  std::int32_t experts;
};

/// Writes row ranges and tile records from the offsets, and a contiguous copy of the row indices.
/// Clamps the values of both.
__global__ void __launch_bounds__(kMetadataThreads)
    offset_lists_kernel(OffsetArgs g, Counters counters, OffsetLists lists) {
  take_ranges(lists.groups, g.experts, counters, [&](int e) {
    const auto offset = [&](int i) {
      return static_cast<int>(min(max(g.offsets[i * g.offset_stride], std::int64_t{0}), g.rows));
    };
    return RowRange{offset(e), max(0, offset(e + 1) - offset(e))};
  });
  if (g.gather == nullptr) return;
  for (std::int64_t i = blockIdx.x * kMetadataThreads + threadIdx.x; i < g.rows;
       i += gridDim.x * kMetadataThreads) {
    const std::int64_t row = g.gather[i * g.gather_stride];
    lists.index[i] = static_cast<std::int32_t>(min(max(row, std::int64_t{0}), g.source_rows - 1));
  }
}

}  // namespace

OffsetLists offset_lists(void* base, std::int64_t rows, std::int64_t experts) {
  Carver<256> carver(base);
  OffsetLists lists{};
  Metadata& groups = lists.groups;
  groups.most_records = static_cast<std::int32_t>(rows / kRecordRows + experts);
  groups.records = carver.take<TileRecord>(groups.most_records);
  groups.record_count = carver.take<std::int32_t>(1);
  groups.expert_begin = carver.take<std::int32_t>(experts);
  groups.expert_rows = carver.take<std::int32_t>(experts);
  lists.index = carver.take<std::int32_t>(rows);
  lists.counters = carver.take<unsigned>(kOffsetCounters);
  lists.bytes = carver.used();
  return lists;
}

void build_offset_lists(const Device& device, const OffsetGroups& groups, const OffsetLists& lists,
                        cudaStream_t stream) {
  const OffsetArgs args{static_cast<const std::int64_t*>(groups.offsets.data),
                        static_cast<const std::int32_t*>(groups.gather.data),
                        groups.offsets.stride[0],
                        groups.gather.stride[0],
                        groups.source_rows > 0 ? groups.rows : 0,
                        groups.source_rows,
                        static_cast<std::int32_t>(groups.experts)};
  const unsigned blocks = args.gather == nullptr ? 1 : kIndexBlocks;
  launch_dependent(device, "launching the lists of a grouped GEMM", offset_lists_kernel,
                   {blocks, kMetadataThreads}, stream, args,
                   Counters{lists.counters, kOffsetCounters}, lists);
}

}  // namespace sonicmoe::cuda
