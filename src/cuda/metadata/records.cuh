// From the rows of every expert to the tile list that the products walk.
#pragma once

#include "cuda/metadata/metadata.h"
#include "cuda/ptx/dependent.cuh"
#include "cuda/routing/block.cuh"

namespace sonicmoe::cuda {

inline constexpr int kPlaceThreads = 1024;  // of every block that calls write_experts
inline constexpr int kMostPlaced = 1024;    // experts

/// Of the products that follow.
struct Counters {
  unsigned* words;
  std::int32_t count;

  /// By the first block.
  __device__ void clear() const {
    if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < count) words[threadIdx.x] = 0;
  }
};

__device__ inline int records_of(int rows) { return (rows + kRecordRows - 1) / kRecordRows; }

/// Rows of thread e's expert.
struct RowRange {
  int begin;
  int rows;
};

/// Shared memory with an entry for every expert.
struct ExpertArrays {
  std::int32_t* first_record;
  std::int32_t* rows;
  std::int32_t* begin;
};

/// Where thread e's records begin, and how many there are in all.
struct RecordPlace {
  int first;
  int count;
};

/// All blocks together: experts and tile records, from thread e's rows.
__device__ inline void write_records(const Metadata& out, int experts, RowRange own,
                                     RecordPlace place, const ExpertArrays& all) {
  const int e = threadIdx.x;
  if (e < experts) {
    all.first_record[e] = place.first;
    all.rows[e] = own.rows;
    all.begin[e] = own.begin;
  }
  __syncthreads();
  if (blockIdx.x == 0) {
    if (e == 0) *out.record_count = min(place.count, out.most_records);
    if (e < experts) {
      out.expert_begin[e] = own.begin;
      out.expert_rows[e] = own.rows;
    }
  }
  // Overlapping groups could ask for more records than there is room for.
  const int last = min(place.count, out.most_records);
  for (int i = blockIdx.x * kPlaceThreads + threadIdx.x; i < last; i += gridDim.x * kPlaceThreads) {
    int low = 0;  // the last expert whose first record is not past i
    for (int high = experts; high - low > 1;) {
      const int middle = (low + high) / 2;
      (all.first_record[middle] <= i ? low : high) = middle;
    }
    out.records[i] = {low, all.begin[low], all.rows[low], all.first_record[low]};
  }
}

/// The same, and where the records begin.
__device__ inline void write_experts(const Metadata& out, int experts, RowRange own,
                                     const ExpertArrays& all) {
  RecordPlace place{};
  place.first = block_prefix<kPlaceThreads>(records_of(own.rows), &place.count);
  write_records(out, experts, own, place, all);
}

/// The whole of a kernel that finds its experts' rows without sorting: waits for the kernel before,
/// clears the counters, and takes range(e) for every expert.
template <class Range>
__device__ void take_ranges(const Metadata& out, int experts, const Counters& counters,
                            const Range& range) {
  __shared__ std::int32_t first_record[kMostPlaced];
  __shared__ std::int32_t rows[kMostPlaced];
  __shared__ std::int32_t begin[kMostPlaced];
  ptx::wait_for_previous_kernel();
  ptx::launch_next_kernel();
  counters.clear();
  const int e = threadIdx.x;
  write_experts(out, experts, e < experts ? range(e) : RowRange{0, 0}, {first_record, rows, begin});
}

}  // namespace sonicmoe::cuda
